// Attention's products in tiles (amx.h): those of tile.h for up to 16 rows, summed in another order. Included inside
// instruction set amx.
namespace ISA {
namespace {

// As many rows of x as are multiplied; a thread's tiles have that many until others are asked for. Tiles 0 to 3 have sums of
// panels, 4 is x, 5 to 7 are lines of panels.
class RowTiles {
public:
    RowTiles() : tiles_(shapes(tile_lines)) {}

    INLINE_MEMBER void take(int64_t rows) {
        if (rows == rows_) return;
        rows_ = rows;
        Tiles::take(shapes(rows));
    }

private:
    static TileShapes shapes(int64_t rows) {
        TileShapes shapes;
        shapes.set(0, 4, rows, line_bytes);
        shapes.set(5, 7, tile_lines, line_bytes);
        return shapes;
    }

    int64_t rows_ = tile_lines;
    Tiles tiles_;
};

// P panels of TileArgs, one after the other.
template <int P, int p = 0, class Each>
INLINE void each_panel(const Each &each) {
    each(Panels<p>{});
    if constexpr (p + 1 < P) each_panel<P, p + 1>(each);
}

template <int p>
INLINE void add_panel(const bf16 *lines) {
    tile_load<5 + p % 3>(lines, line_bytes);
    tile_multiply_bf16<p, 4, 5 + p % 3>();
}

// What tile() does for the rows that tiles were taken for. Pairs that do not fill a tile are copied behind zeros: the lines
// behind them may hold anything.
template <int P>
void tiles_of_rows(int64_t rows, const TileArgs &args) {
    const int64_t whole = args.pairs / tile_lines * tile_lines, rest = args.pairs - whole;
    const int64_t x_bytes = args.x_stride * static_cast<int64_t>(sizeof(bf16)), out_bytes = args.out_stride * static_cast<int64_t>(sizeof(float));
    each_panel<P>([&](auto p) {
        if (args.accumulate) tile_load<p.value>(args.out + p.value * panel_rows, out_bytes);
        else tile_zero<p.value>();
    });
    for (int64_t k = 0; k < whole; k += tile_lines) {
        tile_load<4>(args.x + 2 * k, x_bytes);
        each_panel<P>([&](auto p) {
            const bf16 *lines = args.panels[p.value] + k * line_elements;
            for (int64_t line = 0; args.ahead != 0 && line < tile_lines; line++) prefetch(lines + line * line_elements + args.ahead);
            add_panel<p.value>(lines);
        });
    }
    if (rest != 0) {
        alignas(64) bf16 x[tile_lines][line_elements] = {}, lines[tile_lines][line_elements] = {};
        for (int64_t r = 0; r < rows; r++) memcpy(x[r], args.x + r * args.x_stride + 2 * whole, rest * 2 * sizeof(bf16));
        tile_load<4>(x, line_bytes);
        each_panel<P>([&](auto p) {
            memcpy(lines, args.panels[p.value] + whole * line_elements, rest * line_bytes);
            add_panel<p.value>(lines[0]);
        });
    }
    each_panel<P>([&](auto p) { tile_store<p.value>(args.out + p.value * panel_rows, out_bytes); });
}

}  // namespace
}  // namespace ISA
