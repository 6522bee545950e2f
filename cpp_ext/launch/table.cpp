#include "table.hpp"

namespace opkit::launch {

Table::Table() : owned_(std::make_unique<Slots>(kFirst)), slots_(owned_.get()) {}

size_t Table::stripe() {
    static std::atomic<size_t> threads{0};
    static thread_local const size_t mine = threads.fetch_add(1) % kStripes;
    return mine;
}

const std::shared_ptr<const Entry>* Table::search(const Slots& slots, const Key& key) {
    const uint64_t hash = key.hash();
    for (size_t i = hash & slots.mask;; i = (i + 1) & slots.mask) {
        const Node* node = slots.at[i].load(std::memory_order_acquire);
        if (node == nullptr) return nullptr;
        if (node->hash != hash || !(key == node->key)) continue;
        slots.last.store(node, std::memory_order_release);
        return &node->entry;
    }
}

void Table::place(Slots& slots, const Node* node) {
    size_t i = node->hash & slots.mask;
    while (slots.at[i].load(std::memory_order_relaxed) != nullptr) i = (i + 1) & slots.mask;
    slots.at[i].store(node, std::memory_order_release);
}

void Table::insert(const Key& key, std::shared_ptr<const Entry> entry) {
    std::lock_guard<std::mutex> lock(writing_);
    if (search(*owned_, key) != nullptr) return;
    if (nodes_.size() >= kMost) forget();
    if (2 * (nodes_.size() + 1) > owned_->mask + 1) {
        auto larger = std::make_unique<Slots>(2 * (owned_->mask + 1));
        for (const auto& node : nodes_) place(*larger, node.get());
        publish(std::move(larger), {});
    }
    nodes_.push_back(std::make_unique<Node>(
        Node{key.hash(), std::vector<uint64_t>(key.words(), key.words() + key.size()), std::move(entry)}));
    place(*owned_, nodes_.back().get());
    free_retired();
}

void Table::clear() {
    std::lock_guard<std::mutex> lock(writing_);
    forget();
    free_retired();
}

size_t Table::size() const {
    std::lock_guard<std::mutex> lock(writing_);
    return nodes_.size();
}

void Table::forget() { publish(std::make_unique<Slots>(kFirst), std::exchange(nodes_, {})); }

void Table::publish(std::unique_ptr<Slots> slots, std::vector<std::unique_ptr<Node>> leaving) {
    slots_.store(slots.get());
    retired_.push_back({std::exchange(owned_, std::move(slots)), std::move(leaving)});
}

// A reader that comes after the new slots were published sees those: each stripe that is seen empty now holds no reader
// of the old ones any more.
void Table::free_retired() {
    for (const Readers& readers : readers_)
        if (readers.count.load() != 0) return;
    retired_.clear();
}

}  // namespace opkit::launch
