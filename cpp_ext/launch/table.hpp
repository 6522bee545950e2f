// Entries by key, read without a lock: readers count themselves in and out, and what a writer has taken out of the table
// is freed once there was a moment without readers.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "entry.hpp"
#include "key.hpp"

namespace opkit::launch {

class Table {
public:
    static constexpr size_t kMost = 4096;  // one more, and all are forgotten first

    Table();
    Table(const Table&) = delete;
    Table& operator=(const Table&) = delete;

    // As long as it lives, entries that are found in the table stay.
    class Reading {
    public:
        explicit Reading(const Table& table) : count_(table.readers_[stripe()].count) { count_.fetch_add(1); }
        ~Reading() { count_.fetch_sub(1, std::memory_order_release); }
        Reading(const Reading&) = delete;
        Reading& operator=(const Reading&) = delete;

    private:
        std::atomic<int64_t>& count_;
    };

    // Null: there is none. A Reading must live.
    const std::shared_ptr<const Entry>* find(const Key& key) const {
        const Slots& slots = *slots_.load();
        const Node* last = slots.last.load(std::memory_order_acquire);
        return last != nullptr && key == last->key ? &last->entry : search(slots, key);
    }

    // An entry that is there under this key already stays.
    void insert(const Key& key, std::shared_ptr<const Entry> entry);

    void clear();
    size_t size() const;

private:
    static constexpr size_t kStripes = 16, kFirst = 16;

    struct Node {
        uint64_t hash;
        std::vector<uint64_t> key;
        std::shared_ptr<const Entry> entry;
    };
    struct Slots {  // open addressing, at most half of them taken
        explicit Slots(size_t size) : mask(size - 1), at(new std::atomic<const Node*>[size]()) {}
        size_t mask;
        std::unique_ptr<std::atomic<const Node*>[]> at;
        mutable std::atomic<const Node*> last{nullptr};  // that was found
    };
    struct Retired {
        std::unique_ptr<Slots> slots;
        std::vector<std::unique_ptr<Node>> nodes;
    };
    struct alignas(64) Readers {
        mutable std::atomic<int64_t> count{0};
    };

    static size_t stripe();
    static const std::shared_ptr<const Entry>* search(const Slots& slots, const Key& key);
    static void place(Slots& slots, const Node* node);
    void publish(std::unique_ptr<Slots> slots, std::vector<std::unique_ptr<Node>> leaving);
    void forget();
    void free_retired();

    mutable std::mutex writing_;
    std::unique_ptr<Slots> owned_;
    std::atomic<const Slots*> slots_;
    std::vector<std::unique_ptr<Node>> nodes_;
    std::vector<Retired> retired_;
    mutable Readers readers_[kStripes];
};

}  // namespace opkit::launch
