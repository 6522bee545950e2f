#include "reference.hpp"

#include <cmath>
#include <limits>

namespace opkit::driver {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

double dot(Tensor& a, int64_t ha, int64_t i, Tensor& b, int64_t hb, int64_t j, int64_t batch) {
    double sum = 0;
    for (int64_t c = 0; c < a.sizes[3]; ++c) sum += a.value(batch, ha, i, c) * b.value(batch, hb, j, c);
    return sum;
}

// The logits of a row, and what tanh made of its products before (1 where there is no cap).
struct Row {
    Doubles logits, slopes;
};

Row row_of(const Problem& p, Tensor& q, Tensor& k, int64_t b, int64_t h, int64_t i) {
    Row row{Doubles(static_cast<size_t>(p.shape.keys), kHidden), Doubles(static_cast<size_t>(p.shape.keys), 1)};
    const int64_t kv = h / (p.shape.heads / p.shape.kv_heads);
    for (int64_t j = 0; j < p.shape.keys; ++j) {
        if (!p.visible(b, h, i, j)) continue;
        double logit = dot(q, h, i, k, kv, j, b) * p.scale;
        if (p.softcap > 0) {
            const double bent = std::tanh(logit / p.softcap);
            logit = bent * p.softcap;
            row.slopes[static_cast<size_t>(j)] = 1 - bent * bent;
        }
        row.logits[static_cast<size_t>(j)] = p.added ? logit + p.added(b, h, i, j) : logit;
    }
    return row;
}

double sum_of_exps(const Doubles& logits, double sink) {
    double most = sink, sum = 0;
    for (double logit : logits) most = logit > most || std::isnan(logit) ? logit : most;
    if (most == kHidden) return kHidden;
    for (double logit : logits) sum += std::exp(logit - most);
    return most + std::log(sum + std::exp(sink - most));
}

double weight_of(double logit, double lse) { return logit == kHidden ? 0 : std::exp(logit - lse); }

}  // namespace

Results attend(const Problem& p, Tensor& q, Tensor& k, Tensor& v) {
    Results found;
    for (int64_t b = 0; b < p.shape.batch; ++b)
        for (int64_t h = 0; h < p.shape.heads; ++h)
            for (int64_t i = 0; i < p.shape.queries; ++i) {
                const Row row = row_of(p, q, k, b, h, i);
                const double lse = sum_of_exps(row.logits, p.sinks.empty() ? kHidden : p.sinks[static_cast<size_t>(h)]);
                Doubles out(static_cast<size_t>(p.shape.columns));
                for (int64_t j = 0; j < p.shape.keys; ++j) {
                    if (!p.visible(b, h, i, j)) continue;
                    const double weight = weight_of(row.logits[static_cast<size_t>(j)], lse);
                    for (int64_t c = 0; c < p.shape.columns; ++c)
                        out[static_cast<size_t>(c)] += weight * v.value(b, h / (p.shape.heads / p.shape.kv_heads), j, c);
                }
                found.out.insert(found.out.end(), out.begin(), out.end());
                found.lse.push_back(lse);
            }
    return found;
}

Slopes differentiate(const Problem& p, const Results& results, Tensor& q, Tensor& k, Tensor& v, Tensor& gradient,
                     const std::vector<float>& of_lse) {
    const Shape& s = p.shape;
    Slopes found{Doubles(static_cast<size_t>(s.batch * s.heads * s.queries * s.head)),
                 Doubles(static_cast<size_t>(s.batch * s.kv_heads * s.keys * s.head)),
                 Doubles(static_cast<size_t>(s.batch * s.kv_heads * s.keys * s.columns))};
    for (int64_t n = 0; n < s.batch * s.heads * s.queries; ++n) {
        const int64_t i = n % s.queries, h = n / s.queries % s.heads, b = n / s.queries / s.heads, kv = h / (s.heads / s.kv_heads);
        const Row row = row_of(p, q, k, b, h, i);
        double delta = of_lse.empty() ? 0 : -of_lse[static_cast<size_t>(n)];
        for (int64_t c = 0; c < s.columns; ++c) delta += results.out[static_cast<size_t>(n * s.columns + c)] * gradient.value(b, h, i, c);
        for (int64_t j = 0; j < s.keys; ++j) {
            if (!p.visible(b, h, i, j)) continue;
            const auto at = static_cast<size_t>(j);
            const double weight = weight_of(row.logits[at], results.lse[static_cast<size_t>(n)]);
            const double slope = weight * (dot(gradient, h, i, v, kv, j, b) - delta) * row.slopes[at] * p.scale;
            const int64_t key = (b * s.kv_heads + kv) * s.keys + j;
            for (int64_t c = 0; c < s.head; ++c) {
                found.q[static_cast<size_t>(n * s.head + c)] += slope * k.value(b, kv, j, c);
                found.k[static_cast<size_t>(key * s.head + c)] += slope * q.value(b, h, i, c);
            }
            for (int64_t c = 0; c < s.columns; ++c)
                found.v[static_cast<size_t>(key * s.columns + c)] += weight * gradient.value(b, h, i, c);
        }
    }
    return found;
}

}  // namespace opkit::driver
