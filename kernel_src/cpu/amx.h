// Tiles of AMX: eight registers of up to 16 rows of 64 bytes, and products of them. Included inside instruction set amx.
//
// A product adds to tile C the rows of A times B: with 8 bits, A has rows of x, four inputs after the other, and a row of
// B is a line of a panel, four inputs of 16 outputs; C is i32 [rows of A][16]. (Intel's Software Developer's Manual,
// volume 2, LDTILECFG, TILELOADD, TDPBSSD.) In assembly, because intrinsics want compiler flags that not every compiler has.
namespace ISA {
namespace {

constexpr int64_t tile_lines = 16, tile_bytes = tile_lines * line_bytes;

// What LDTILECFG reads: of each tile, bytes of a row and rows.
struct TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Of tiles `first` to `last`.
    void set(int first, int last, int64_t lines, int64_t bytes) {
        for (int tile = first; tile <= last; tile++) {
            rows[tile] = static_cast<uint8_t>(lines);
            row_bytes[tile] = static_cast<uint16_t>(bytes);
        }
    }
};
static_assert(sizeof(TileShapes) == 64, "the operand of LDTILECFG");

// A thread has tiles as long as this lives. Without, switching between threads is cheaper.
class Tiles {
public:
    explicit Tiles(const TileShapes &shapes) { take(shapes); }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles &) = delete;

    // All tiles are zero then.
    static void take(const TileShapes &shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
};

template <int tile>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

// Rows are `stride` bytes apart.
template <int tile>
INLINE void tile_load(const void *first, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(first), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
INLINE void tile_store(void *first, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(first), "r"(stride), "i"(tile) : "memory");
}

// Tile c += a * b: a without and b with a sign.
template <int c, int a, int b>
INLINE void tile_multiply_u8_i8() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

// Both with a sign.
template <int c, int a, int b>
INLINE void tile_multiply_i8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

// a with and b without.
template <int c, int a, int b>
INLINE void tile_multiply_i8_u8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

// Pairs of bf16, sums in f32: those of first and those of second inputs, each in its order, and both together to c.
// Subnormal numbers are zero.
template <int c, int a, int b>
INLINE void tile_multiply_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

}  // namespace
}  // namespace ISA
