// route: which experts each row takes, and their shares.
// x bf16 [rows][cols], weight bf16 panels (panels.h) of [experts][cols], bias bf16 [experts]; chosen i32 and shares f32
// [rows][top].
// Logits x @ weight^T + bias are f32, and not rounded. A row takes the experts with the `top` largest, of equal ones the first;
// they are stored in the order of their ids. Shares are the softmax of all logits, or with `normed` of those of the chosen.
// route_sigmoid: of logits without bias a row takes the largest sigmoids plus bias f32 [experts]. Shares are the sigmoids, with
// `normed` of the chosen divided by their sum.
#include "vec.h"
#include "epilogue.h"
#include "operand.h"
#include "streams.h"
#include "tile.h"
#include "gemm_core.h"
#include "gemv_core.h"

namespace ISA {
namespace {

struct Router {
    int64_t experts, top;
    bool normed;

    // The expert with the largest logit behind expert `last` in the order of choice: logits descending, then ids ascending.
    int64_t best_behind(const float *logits, int64_t last) const {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; e++) {
            const bool behind = last < 0 || logits[e] < logits[last] || (logits[e] == logits[last] && e > last);
            if (behind && (best < 0 || logits[e] > logits[best])) best = e;
        }
        return best;
    }

    void choose(const float *logits, int32_t *chosen) const {
        for (int64_t count = 0, last = -1; count < top; count++) {
            last = best_behind(logits, last);
            int64_t place = count;
            for (; place > 0 && chosen[place - 1] > last; place--) chosen[place] = chosen[place - 1];
            chosen[place] = static_cast<int32_t>(last);
        }
    }

    // logits f32 [experts] become what their exponentials are to the largest's.
    void exponentials(float *logits) const {
        float most = logits[0];
        for (int64_t e = 1; e < experts; e++) most = logits[e] > most ? logits[e] : most;
        for (int64_t e = 0; e < experts; e += lanes) {
            const f32v powers = exp2(max((load_f32(logits + e, experts - e) - most) * 1.44269504f, splat(-256.0f)));
            for (int64_t i = e; i < experts && i < e + lanes; i++) logits[i] = powers[i - e];
        }
    }

    // What is no number has no place in an order.
    static float last_if_nan(float score) { return score == score ? score : -INFINITY; }

    void row(float *logits, const bf16 *bias, int32_t *chosen, float *shares) const {
        for (int64_t e = 0; e < experts; e++) {
            if (bias != nullptr) logits[e] += to_float(bias[e]);
            logits[e] = last_if_nan(logits[e]);
        }
        choose(logits, chosen);
        exponentials(logits);
        float sum = 0;
        for (int64_t e = 0; !normed && e < experts; e++) sum += logits[e];
        for (int64_t j = 0; normed && j < top; j++) sum += logits[chosen[j]];
        for (int64_t j = 0; j < top; j++) shares[j] = logits[chosen[j]] / sum;
    }

    // scores f32 [experts], scratch.
    void sigmoid_row(const float *logits, const float *bias, float *scores, int32_t *chosen, float *shares) const {
        for (int64_t e = 0; e < experts; e++) scores[e] = last_if_nan(sigmoid(logits[e]) + bias[e]);
        choose(scores, chosen);
        float sum = least_sum;
        for (int64_t j = 0; j < top; j++) sum += shares[j] = sigmoid(logits[chosen[j]]);
        for (int64_t j = 0; normed && j < top; j++) shares[j] /= sum;
    }

    static float sigmoid(float logit) { return 1.0f / (1.0f + exp2f(logit * -1.44269504f)); }

    static constexpr float least_sum = 1e-6f;  // transformers, models/lfm2_moe
};

// Calls each(row, its logits f32 [experts]) for all rows.
template <class Each>
void each_row(const bf16 *x, const bf16 *weight, int64_t rows, int64_t cols, int64_t experts, Worker &worker, const Each &each) {
    float *logits = worker.shared_scratch<float>(rows * experts);
    const bf16 *weights[] = {weight};
    if (rows == 1) gemv_panels(weights, x, experts, cols, StoreF32{logits, experts}, worker);
    else Gemm<StoreF32>(x, weights, rows, cols, experts, {logits, experts}).run(worker);
    worker.barrier();
    Chunks chunks(worker, rows, 8);
    for (int64_t r, end; chunks.next(r, end);)
        for (; r < end; r++) each(r, logits + r * experts);
}

void route(const bf16 *x, const bf16 *weight, const bf16 *bias, int32_t *chosen, float *shares, int64_t rows, int64_t cols,
           const Router &router, Worker &worker) {
    each_row(x, weight, rows, cols, router.experts, worker, [&](int64_t r, float *logits) {
        router.row(logits, bias, chosen + r * router.top, shares + r * router.top);
    });
}

}  // namespace
}  // namespace ISA

KERNEL void route(const bf16 *x, const bf16 *weight, int32_t *chosen, float *shares, int64_t rows, int64_t cols,
                  int64_t experts, int64_t top, int64_t normed, Worker &worker) {
    ISA::route(x, weight, nullptr, chosen, shares, rows, cols, {experts, top, normed != 0}, worker);
}

KERNEL void route_bias(const bf16 *x, const bf16 *weight, const bf16 *bias, int32_t *chosen, float *shares, int64_t rows,
                       int64_t cols, int64_t experts, int64_t top, int64_t normed, Worker &worker) {
    ISA::route(x, weight, bias, chosen, shares, rows, cols, {experts, top, normed != 0}, worker);
}

KERNEL void route_sigmoid(const bf16 *x, const bf16 *weight, const float *bias, int32_t *chosen, float *shares, int64_t rows,
                          int64_t cols, int64_t experts, int64_t top, int64_t normed, Worker &worker) {
    const ISA::Router router = {experts, top, normed != 0};
    ISA::each_row(x, weight, rows, cols, experts, worker, [&](int64_t r, float *logits) {
        router.sigmoid_row(logits, bias, worker.scratch<float>(experts), chosen + r * top, shares + r * top);
    });
}
