// What a step does on a CPU beside matrix products, for a few rows: one pass each, where torch takes several calls.
//
// Owns the arithmetic; ops/cpu_native.py compiles and calls it, once for float32 and once, with BFLOAT16 defined, for bfloat16.
// Values are rounded where the plain torch operations round them. No threads: waking one costs more than a few rows take.
// Shapes: T tokens, R rows, E hidden size, F intermediate size, N all heads (queries, keys, values), H query heads, K key/value
// heads, D head dim, S page size.

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef BFLOAT16
typedef uint16_t number;

static inline float get(number value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

static inline number put(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
#else
typedef float number;

static inline float get(number value) { return value; }
static inline number put(float value) { return value; }
#endif

static inline float rounded(float value) { return get(put(value)); }

// e^x to 2 units in the last place; 0 below -87, infinity above 88. NaN stays NaN.
static inline float exponential(float x) {
    float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float power = rintf(bounded * 1.44269504088896341f);
    float rest = fmaf(power, 2.12194440e-4f, fmaf(power, -0.693359375f, bounded));  // calls, or the two would be joined
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)power + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : x > 88.0f ? INFINITY : sum * scale;
}

static inline float norm_factor(const number *x, int64_t size, float eps) {
    float sum = 0.0f;
    for (int64_t i = 0; i < size; i++) sum += get(x[i]) * get(x[i]);
    return 1.0f / sqrtf(sum / (float)size + eps);
}

// out [T, E] = x / sqrt(mean(x^2) + eps) * weight; rows of x are `stride` apart.
void rms_norm(const number *restrict x, const number *restrict weight, number *restrict out, int64_t tokens, int64_t size,
              int64_t stride, float eps) {
    for (int64_t t = 0; t < tokens; t++, x += stride, out += size) {
        float factor = norm_factor(x, size, eps);
        for (int64_t i = 0; i < size; i++) out[i] = put(rounded(get(x[i]) * factor) * get(weight[i]));
    }
}

// out [T, F] = silu(gate) * up of rows [gate, up].
void silu_mul(const number *restrict gate_up, number *restrict out, int64_t tokens, int64_t size) {
    for (int64_t t = 0; t < tokens; t++, gate_up += 2 * size, out += size)
        for (int64_t i = 0; i < size; i++) {
            float gate = get(gate_up[i]);
            out[i] = put(rounded(gate / (1.0f + exponential(-gate))) * get(gate_up[size + i]));
        }
}

// Normalise (if there are weights [D]) and rotate the query and key heads of qkv [T, N, D] in place, then copy keys and values to
// their places in the cache. cosines and sines [T, D] are those of rope.py's step_rows: sines are negative in the first half.
void rotate_and_store(number *restrict qkv, const number *query_weight, const number *key_weight, float eps, const number *cosines,
                      const number *sines, number *restrict keys, number *restrict values, const int64_t *places, int64_t tokens,
                      int64_t heads, int64_t kv_heads, int64_t dim) {
    int64_t half = dim / 2, kv_size = kv_heads * dim;
    for (int64_t t = 0; t < tokens; t++, cosines += dim, sines += dim, qkv += heads * dim + 2 * kv_size) {
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            number *x = qkv + h * dim;
            const number *weight = h < heads ? query_weight : key_weight;
            if (weight) {
                float factor = norm_factor(x, dim, eps);
                for (int64_t i = 0; i < dim; i++) x[i] = put(rounded(get(x[i]) * factor) * get(weight[i]));
            }
            for (int64_t i = 0; i < half; i++) {
                float first = get(x[i]), second = get(x[half + i]);
                x[i] = put(rounded(first * get(cosines[i])) + rounded(second * get(sines[i])));
                x[half + i] = put(rounded(second * get(cosines[half + i])) + rounded(first * get(sines[half + i])));
            }
        }
        memcpy(keys + places[t] * kv_size, qkv + heads * dim, kv_size * sizeof(number));
        memcpy(values + places[t] * kv_size, qkv + heads * dim + kv_size, kv_size * sizeof(number));
    }
}

static void attend_head(const number *restrict query, const number *restrict keys, const number *restrict values, const int32_t *table,
                        float *restrict scores, float *restrict sums, int64_t context, int64_t group, int64_t token, int64_t dim,
                        int64_t page_size, float scale) {
    for (int64_t c = 0; c < context; c++) {
        const number *key = keys + (table[c / page_size] * page_size + c % page_size) * token;
        for (int64_t g = 0; g < group; g++) {
            float sum = 0.0f;
            for (int64_t i = 0; i < dim; i++) sum += get(query[g * dim + i]) * get(key[i]);
            scores[g * context + c] = sum * scale;
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float *score = scores + g * context, most = score[0], sum = 0.0f;
        for (int64_t c = 1; c < context; c++) most = score[c] > most ? score[c] : most;
        for (int64_t c = 0; c < context; c++) {
            score[c] = exponential(score[c] - most);
            sum += score[c];
        }
        for (int64_t c = 0; c < context; c++) score[c] /= sum;
    }
    memset(sums, 0, group * dim * sizeof(float));
    for (int64_t c = 0; c < context; c++) {
        const number *value = values + (table[c / page_size] * page_size + c % page_size) * token;
        for (int64_t g = 0; g < group; g++)
            for (int64_t i = 0; i < dim; i++) sums[g * dim + i] += scores[g * context + c] * get(value[i]);
    }
}

// One query a row, over the pages of its context. q [R, H, D] with rows `stride` apart; keys and values [pages, S, K, D]; tables with
// rows `width` apart; out [R, H, D]. `scratch` has room for H / K times the longest context and D values.
void attend(const number *q, int64_t stride, const number *keys, const number *values, const int32_t *table, int64_t width,
            const int32_t *context_lens, float *scratch, number *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
            int64_t page_size, float scale) {
    int64_t group = heads / kv_heads;
    float *scores = scratch + group * dim;
    for (int64_t r = 0; r < rows; r++, q += stride, table += width)
        for (int64_t k = 0; k < kv_heads; k++, out += group * dim) {
            attend_head(q + k * group * dim, keys + k * dim, values + k * dim, table, scores, scratch, context_lens[r], group,
                        kv_heads * dim, dim, page_size, scale);
            for (int64_t i = 0; i < group * dim; i++) out[i] = put(scratch[i]);
        }
}

// One id a row, drawn from softmax(logits): the arg max of logits plus Gumbel noise, a pure function of the row's key and the id, as in
// sampling.py. Nearly all ids are passed over by a bound of their noise, without a logarithm. logits float32 [R, V].
void draw(const float *logits, const int64_t *keys, int64_t *ids, int64_t rows, int64_t vocab) {
    for (int64_t r = 0; r < rows; r++, logits += vocab) {
        double best = -INFINITY;
        uint64_t counter = (uint64_t)keys[r];
        ids[r] = 0;
        for (int64_t v = 0; v < vocab; v++, counter += 0x9E3779B97F4A7C15u) {
            uint64_t x = (counter ^ (counter >> 30)) * 0xBF58476D1CE4E5B9u;
            x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
            uint32_t bits = (uint32_t)((x ^ (x >> 31)) >> 32);
            // -log(-log(u)) <= -log(1 - u), and 1 - u >= 2 ** -(leading ones + 1)
            int ones = bits == UINT32_MAX ? 32 : __builtin_clz(~bits);
            if (logits[v] + 0.6931472 * (ones + 1) <= best) continue;
            double value = logits[v] - log(-log((bits + 0.5) * 0x1p-32));
            if (value > best) {
                best = value;
                ids[r] = v;
            }
        }
    }
}
