// How decoding attention is divided among threads, and its parts merged. The division depends on each sequence alone, so that
// neither the number of threads nor the other sequences of a batch change a result.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "decode_call.hpp"
#include "packing.hpp"
#include "workers.hpp"

namespace opkit::attention {
namespace {

// Keys in a part, also for each of its rows, so that results of parts are small compared with the keys; parts of a sequence.
constexpr int64_t kLeastPart = 256, kLeastForRow = 16, kMostParts = 32;
constexpr int64_t kBytes[] = {4, 2, 2, 1, 1};  // of an ElementType
constexpr Type kTypes[] = {Type::Float, Type::Brain, Type::Half};

template <class T>
T* pointer(int64_t address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Memory of the calling thread that is reused from call to call, since fresh pages for each call cost more than the merge that reads them.
float* thread_floats(size_t count) {
    thread_local std::vector<float> memory;
    if (memory.size() < count) memory.resize(count);
    return memory.data();
}

struct Sequence {
    int64_t index, first, queries, length, shift;  // first: number of its first query, in a ragged batch
    int64_t begin, end, part, parts;               // keys that some query sees; keys of a part; how many parts
    int64_t slot;                                  // number of its first part's first row's result
};

struct Part {
    int64_t sequence, head, part;
};

int64_t clamped(int64_t value, int64_t low, int64_t high) { return std::min(std::max(value, low), high); }

// Parts begin at multiples of kTileKeys, apart from the first.
int64_t first_of_parts(const Sequence& sequence) { return sequence.begin / kTileKeys * kTileKeys; }

void divide(const DecodeCall& call, Sequence& sequence, int64_t rows) {
    const int64_t last = sequence.queries - 1 + sequence.shift;
    sequence.begin = clamped(sequence.shift + call.lower, 0, sequence.length);
    sequence.end = clamped(last + call.upper + 1, sequence.begin, sequence.length);
    if (sequence.queries == 0) sequence.end = sequence.begin;
    const int64_t keys = sequence.end - first_of_parts(sequence), even = (keys + kMostParts - 1) / kMostParts;
    const int64_t least = std::max(kLeastPart, rows * kLeastForRow);
    sequence.part = (std::max(least, even) + kTileKeys - 1) / kTileKeys * kTileKeys;
    sequence.parts = (keys + sequence.part - 1) / sequence.part;
}

[[noreturn]] void refuse(const char* what, int64_t sequence, int64_t value, int64_t limit) {
    throw std::invalid_argument(std::string(what) + " of sequence " + std::to_string(sequence) + " is " +
                                std::to_string(value) + "; it must be from 0 to " + std::to_string(limit));
}

void check_pages(const DecodeCall& call, const Sequence& sequence) {
    if (!call.table) return;
    const auto* row = pointer<const int32_t>(call.table) + sequence.index * call.table_row;
    for (int64_t at = sequence.begin / call.page_size; at * call.page_size < sequence.end; ++at)
        if (row[at] < 0 || row[at] >= call.pages) refuse("a page", sequence.index, row[at], call.pages - 1);
}

Sequence make_sequence(const DecodeCall& call, int64_t index, int64_t group) {
    const auto* starts = pointer<const int64_t>(call.starts);
    const auto* lengths = pointer<const int64_t>(call.lengths);
    Sequence sequence{};
    sequence.index = index;
    sequence.first = starts ? starts[index] : 0;
    sequence.queries = starts ? starts[index + 1] - starts[index] : call.queries;
    sequence.length = lengths ? lengths[index] : call.keys;
    if (sequence.length < 0 || sequence.length > call.keys) refuse("the length", index, sequence.length, call.keys);
    if (sequence.first < 0 || sequence.queries < 0 || sequence.first + sequence.queries > call.queries)
        refuse("the last query", index, sequence.first + sequence.queries, call.queries);
    sequence.shift = call.from_end ? sequence.length - sequence.queries : 0;
    divide(call, sequence, group * sequence.queries);
    check_pages(call, sequence);
    return sequence;
}

class Decoding {
public:
    Decoding(const DecodeCall& call, const isa::Table& kernels, const DecodePrograms* programs)
        : call_(call), kernels_(kernels), programs_(programs), group_(call.kv_heads ? call.heads / call.kv_heads : 0) {
        for (int64_t i = 0; i < call.sequences; ++i) add(make_sequence(call, i, group_));
        static std::atomic<uint64_t> calls{0};
        number_ = ++calls;
        totals_ = thread_floats(static_cast<size_t>(slots_ * (2 + call.dv)));
        sums_ = totals_ + 2 * slots_;
    }

    void run() {
        const int64_t parts = static_cast<int64_t>(parts_.size()), heads = static_cast<int64_t>(sequences_.size()) * call_.heads;
        parallel_for(0, parts, grain(multiplied_, parts), attend, this);
        parallel_for(0, heads, grain(slots_ * call_.dv, heads), merge, this);
    }

private:
    // Pieces of `work`, of which there are so many, that are worth a thread.
    static int64_t grain(int64_t work, int64_t pieces) { return work < attention::kLeastShared ? std::max<int64_t>(pieces, 1) : 1; }

    // Heads of a part follow each other, as they lie in the same pages of memory.
    void add(Sequence sequence) {
        if (programs_ && sequence.shift < 0) refuse("the number of queries", sequence.index, sequence.queries, sequence.length);
        sequence.slot = slots_;
        for (int64_t part = 0; part < sequence.parts; ++part)
            for (int64_t head = 0; head < call_.kv_heads; ++head) parts_.push_back({sequence.index, head, part});
        slots_ += sequence.parts * call_.heads * sequence.queries;
        most_rows_ = std::max(most_rows_, group_ * sequence.queries);
        multiplied_ += (sequence.end - sequence.begin) * call_.heads * sequence.queries * (call_.d + call_.dv);
        sequences_.push_back(sequence);
    }

    // The number of the result of a query head's first query in a part.
    int64_t slot(const Sequence& sequence, int64_t part, int64_t head) const {
        return sequence.slot + (part * call_.heads + head) * sequence.queries;
    }

    DecodeRows keys(const Sequence& sequence, int64_t head) const {
        const int64_t page = call_.table ? 0 : sequence.index;
        return {pointer<const unsigned char>(call_.k) + page * call_.k_page + head * call_.k_head, call_.k_page, call_.k_token,
                scale(call_.k_scale, page * call_.k_scale_page + head * call_.k_scale_head), call_.k_scale_page,
                call_.k_scale_token, call_.d};
    }
    DecodeRows values(const Sequence& sequence, int64_t head) const {
        const int64_t page = call_.table ? 0 : sequence.index;
        return {pointer<const unsigned char>(call_.v) + page * call_.v_page + head * call_.v_head, call_.v_page, call_.v_token,
                scale(call_.v_scale, page * call_.v_scale_page + head * call_.v_scale_head), call_.v_scale_page,
                call_.v_scale_token, call_.dv};
    }
    static const float* scale(int64_t address, int64_t offset) {
        return address ? pointer<const float>(address) + offset : nullptr;
    }

    DecodeTask task_of(const Part& part, void* workspace) const {
        const Sequence& sequence = sequences_[static_cast<size_t>(part.sequence)];
        DecodeTask task{};
        task.q = pointer<const unsigned char>(call_.q) + part.head * group_ * call_.q_head +
                 sequence.index * call_.q_sequence + sequence.first * call_.q_token;
        task.q_head = call_.q_head, task.q_token = call_.q_token;
        task.group = group_, task.queries = sequence.queries;
        task.k = keys(sequence, part.head), task.v = values(sequence, part.head);
        task.pages = call_.table ? pointer<const int32_t>(call_.table) + sequence.index * call_.table_row : nullptr;
        task.page_size = call_.table ? call_.page_size : kUnlimited;
        const int64_t begin = first_of_parts(sequence) + part.part * sequence.part;
        task.begin = std::max(begin, sequence.begin);
        task.end = std::min(begin + sequence.part, sequence.end);
        task.length = sequence.length;
        task.lower = call_.lower + sequence.shift, task.upper = call_.upper + sequence.shift;
        task.scale = static_cast<float>(call_.scale), task.softcap = static_cast<float>(call_.softcap);
        task.q_type = static_cast<ElementType>(call_.q_type), task.kv_type = static_cast<ElementType>(call_.kv_type);
        task.kv_bytes = kBytes[task.kv_type];
        const int64_t slot = this->slot(sequence, part.part, part.head * group_);
        task.maximum = totals_ + slot, task.total = totals_ + slots_ + slot;
        task.sum = sums_ + slot * call_.dv;
        task.workspace = workspace;
        task.look = programs_ && programs_->mask ? look : nullptr;
        task.apply = programs_ && programs_->biases ? apply : nullptr;
        task.context = this;
        task.sequence = sequence.index, task.head = part.head * group_, task.row = sequence.shift;
        return task;
    }

    static bool look(const DecodeTask& task, int64_t key, int64_t keys, uint64_t* visible) {
        const auto& self = *static_cast<const Decoding*>(task.context);
        bool any = false;
        for (int64_t g = 0; g < task.group && self.programs_->by_head; ++g)
            any |= self.look_at({task.sequence, task.head + g, task.row, task.queries, key, keys}, visible + g * task.queries);
        if (self.programs_->by_head) return any;
        const Seen& seen = self.seen_by_all({task.sequence, task.head, task.row, task.queries, key, keys});
        for (int64_t g = 0; g < task.group && seen.any; ++g)
            std::copy(seen.visible.begin(), seen.visible.end(), visible + g * task.queries);
        return seen.any;
    }

    // Gives whether anything is seen.
    bool look_at(const Tile& tile, uint64_t* visible) const {
        thread_local std::vector<uint64_t> scratch;
        scratch.resize(static_cast<size_t>(programs_->mask->scratch(tile.rows)));
        const State state = programs_->mask->look(tile, scratch.data(), visible);
        if (state != kPartial) std::fill_n(visible, tile.rows, state == kFull ? ~uint64_t{0} : 0);
        return state != kHidden;
    }

    // What all heads see of a tile. The calling thread, which has heads of a part one after the other, looks at it once.
    struct Seen {
        bool known = false, any = false;
        std::vector<uint64_t> visible;
    };
    const Seen& seen_by_all(const Tile& tile) const {
        thread_local struct {
            uint64_t call = 0;
            int64_t sequence = 0;
            std::vector<Seen> tiles;
        } found;
        if (found.call != number_ || found.sequence != tile.batch) {
            found.call = number_, found.sequence = tile.batch;
            for (Seen& each : found.tiles) each.known = false;
        }
        const size_t at = static_cast<size_t>(tile.key / kTileKeys);
        if (found.tiles.size() <= at) found.tiles.resize(2 * at + 1);
        Seen& seen = found.tiles[at];
        if (!seen.known) {
            seen.visible.resize(static_cast<size_t>(tile.rows));
            seen.known = true;
            seen.any = look_at(tile, seen.visible.data());
        }
        return seen;
    }

    static void apply(const DecodeTask& task, int64_t key, int64_t keys, float* logits) {
        const DecodePrograms& programs = *static_cast<const Decoding*>(task.context)->programs_;
        for (int64_t g = 0; g < task.group; ++g)
            programs.biases->add_and_apply({task.sequence, task.head + g, task.row, task.queries, key, keys},
                                           logits + g * task.queries * kTileKeys, kTileKeys);
    }

    static void attend(int64_t begin, int64_t end, void* context) {
        auto& self = *static_cast<Decoding*>(context);
        const int64_t bytes = decode_workspace(self.most_rows_, self.call_.d, self.call_.dv);
        const std::unique_ptr<unsigned char[]> memory(new unsigned char[static_cast<size_t>(bytes) + 64]);
        const auto address = (reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64;
        DecodeTask task{}, following = self.task_of(self.parts_[static_cast<size_t>(begin)], reinterpret_cast<void*>(address));
        for (int64_t i = begin; i < end; ++i) {
            task = following;
            task.prefetched = i > begin;
            if (i + 1 < end) {
                following = self.task_of(self.parts_[static_cast<size_t>(i + 1)], reinterpret_cast<void*>(address));
                task.following = &following;
            }
            self.kernels_.attend_decode(&task);
        }
    }

    // In the order of the parts, whichever thread does it.
    static void merge(int64_t begin, int64_t end, void* context) {
        auto& self = *static_cast<Decoding*>(context);
        std::vector<float> sum(static_cast<size_t>(self.call_.dv));
        for (int64_t i = begin; i < end; ++i) {
            const Sequence& sequence = self.sequences_[static_cast<size_t>(i / self.call_.heads)];
            for (int64_t query = 0; query < sequence.queries; ++query)
                self.merge_row(sequence, i % self.call_.heads, query, sum);
        }
    }

    void merge_row(const Sequence& sequence, int64_t head, int64_t query, std::vector<float>& sum) const {
        const auto* sinks = pointer<const float>(call_.sinks);
        const float hidden = -std::numeric_limits<float>::infinity(), sink = sinks ? sinks[head] : hidden;
        float most = sink;
        for (int64_t part = 0; part < sequence.parts; ++part)
            most = std::max(most, totals_[slot(sequence, part, head) + query]);
        const float base = most == hidden ? 0.0f : most;
        float total = kWeight * std::exp(sink - base);
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t part = 0; part < sequence.parts; ++part) {
            const int64_t at = slot(sequence, part, head) + query;
            const float weight = std::exp(totals_[at] - base);
            total += weight * totals_[slots_ + at];
            const float* partial = sums_ + at * call_.dv;
            for (int64_t c = 0; c < call_.dv; ++c) sum[static_cast<size_t>(c)] += weight * partial[c];
        }
        write(sequence, head, query, sum, total, base);
    }

    void write(const Sequence& sequence, int64_t head, int64_t query, std::vector<float>& sum, float total, float base) const {
        const int64_t token = sequence.first + query;
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        for (float& value : sum) value *= inverse;
        write_row(kernels_, sum.data(), call_.dv, kTypes[call_.q_type],
                  pointer<unsigned char>(call_.out) + sequence.index * call_.out_sequence + head * call_.out_head +
                      token * call_.out_token);
        float* lse = pointer<float>(call_.lse) + sequence.index * call_.lse_sequence + head * call_.lse_head +
                     token * call_.lse_token;
        *lse = base + std::log(total / kWeight);
    }

    const DecodeCall& call_;
    const isa::Table& kernels_;
    const DecodePrograms* programs_;
    const int64_t group_;
    int64_t slots_ = 0, most_rows_ = 0, multiplied_ = 0;
    std::vector<Sequence> sequences_;
    std::vector<Part> parts_;
    uint64_t number_ = 0;                        // of this call, of all that there were in the process
    float *totals_ = nullptr, *sums_ = nullptr;  // of each part and row: greatest logits, totals; sums of values
};

}  // namespace

void decode(const DecodeCall& call, const isa::Table& kernels, const DecodePrograms* programs) {
    if (call.d > kLargestHead || call.dv > kLargestHead) throw std::invalid_argument("a head size is greater than 1024");
    Decoding(call, kernels, programs).run();
}

}  // namespace opkit::attention
