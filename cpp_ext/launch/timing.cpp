#include "timing.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace opkit::launch {
namespace {

constexpr int64_t kFlushed = int64_t{256} << 20;  // bytes: more than the last-level cache of any GPU here
constexpr int64_t kFirst = 5, kMost = 1000;       // launches

class Event {
public:
    explicit Event(const Driver& driver) : driver_(driver) { driver(driver.make_event, &event_, 0u); }
    ~Event() {
        if (event_ != nullptr) driver_.destroy_event.pointer(event_);
    }
    Event(Event&& other) noexcept : driver_(other.driver_), event_(std::exchange(other.event_, nullptr)) {}

    void record(void* stream) const { driver_(driver_.record_event, event_, stream); }
    void await() const { driver_(driver_.await_event, event_); }
    double since(const Event& start) const {
        float milliseconds = 0;
        driver_(driver_.elapsed, &milliseconds, start.event_, event_);
        return milliseconds;
    }

private:
    const Driver& driver_;
    void* event_ = nullptr;
};

// Copies of tensors' memory, from which it is restored in the end, whatever happens.
class Saved {
public:
    Saved(const Driver& driver, const Frame& frame) : driver_(driver), frame_(frame) {}
    ~Saved() {
        for (const auto& [memory, copy] : copies_)
            driver_.copy.pointer(reinterpret_cast<uint64_t>(memory), reinterpret_cast<uint64_t>(copy.data()),
                                 static_cast<size_t>(copy.size()), frame_.stream);
    }
    Saved(const Saved&) = delete;
    Saved& operator=(const Saved&) = delete;

    void add(const opk_tensor& tensor) {
        const int64_t bytes = extent_bytes(tensor);
        if (bytes == 0) return;
        Buffer copy(frame_.device, bytes);
        driver_(driver_.copy, reinterpret_cast<uint64_t>(copy.data()), reinterpret_cast<uint64_t>(tensor.data),
                static_cast<size_t>(bytes), frame_.stream);
        copies_.emplace_back(tensor.data, std::move(copy));
    }

private:
    const Driver& driver_;
    const Frame& frame_;
    std::vector<std::pair<void*, Buffer>> copies_;
};

class Stopwatch {
public:
    Stopwatch(const Entry& entry, const Frame& frame)
        : entry_(entry), frame_(frame), driver_(entry.binary().driver()), flushed_(frame.device, kFlushed) {}

    // Launches so many times; the milliseconds that each took.
    std::vector<double> launch(int64_t count) {
        while (events_.size() < 2 * static_cast<size_t>(count)) events_.emplace_back(driver_);
        for (int64_t i = 0; i < count; i++)
            launch_once(events_[static_cast<size_t>(2 * i)], events_[static_cast<size_t>(2 * i + 1)]);
        std::vector<double> took;
        events_[static_cast<size_t>(2 * count - 1)].await();
        for (int64_t i = 0; i < count; i++)
            took.push_back(events_[static_cast<size_t>(2 * i + 1)].since(events_[static_cast<size_t>(2 * i)]));
        return took;
    }

    // How many launches fill so many milliseconds, by the flushes between them too.
    int64_t fitting(double milliseconds) {
        if (each_ == 0) {
            launch(1);  // the first one loads
            launch(kFirst);
            const Event &first = events_[0], &last = events_[2 * kFirst - 1];
            each_ = last.since(first) / kFirst;
        }
        return std::clamp(each_ > 0 ? static_cast<int64_t>(milliseconds / each_) : kMost, int64_t{1}, kMost);
    }

private:
    void launch_once(const Event& before, const Event& after) {
        driver_(driver_.fill, reinterpret_cast<uint64_t>(flushed_.data()), uint8_t{0}, static_cast<size_t>(kFlushed),
                frame_.stream);
        entry_.prepare(frame_);
        before.record(frame_.stream);
        entry_.run(frame_);
        after.record(frame_.stream);
    }

    const Entry& entry_;
    const Frame& frame_;
    const Driver& driver_;
    Buffer flushed_;
    std::vector<Event> events_;
    double each_ = 0;
};

}  // namespace

double time(const Entry& entry, const Frame& frame, const TimeLimits& limits, const std::vector<int64_t>& written) {
    if (Driver::is_captured(frame.stream))
        throw std::runtime_error(
            "nothing can be measured while the stream is being captured; call the operator once before the capture");
    if (entry.empty()) return 0;
    const Driver& driver = entry.binary().driver();
    driver.enter(frame.device);
    Saved saved(driver, frame);
    for (const int64_t source : written)
        if (const opk_tensor* tensor = frame.tensor(static_cast<size_t>(source))) saved.add(*tensor);
    Stopwatch stopwatch(entry, frame);
    if (limits.warmup > 0) stopwatch.launch(stopwatch.fitting(limits.warmup));
    std::vector<double> took = stopwatch.launch(stopwatch.fitting(limits.run));
    const auto middle = took.begin() + static_cast<int64_t>(took.size() / 2);
    std::nth_element(took.begin(), middle, took.end());
    return *middle;
}

}  // namespace opkit::launch
