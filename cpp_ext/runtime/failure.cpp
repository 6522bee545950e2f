#include "failure.hpp"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace opkit {
namespace {

thread_local Report* here = nullptr;
std::mutex writing;

// A thread that an OpenMP region started belongs to no call that we know of: the next call to end takes its report.
std::string stray;
std::atomic<bool> strayed{false};

std::string located(const char* file, int32_t line, const char* message) {
    return std::string(message) + " (" + file + ":" + std::to_string(line) + ")";
}

}  // namespace

Report::Report() : outer_(here) { here = this; }

Report::~Report() { here = outer_; }

bool Report::failed() const { return failed_ || strayed.load(std::memory_order_acquire); }

std::string Report::text() const {
    std::lock_guard<std::mutex> lock(writing);
    if (failed_) return text_;
    strayed = false;
    return std::move(stray);
}

Reporting::Reporting(Report* report) : before_(here) { here = report; }

Reporting::~Reporting() { here = before_; }

Report* Reporting::current() { return here; }

void fail(const char* file, int32_t line, const char* format, ...) {
    char message[900];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    std::lock_guard<std::mutex> lock(writing);
    if (here == nullptr) {
        if (!strayed) stray = located(file, line, message);
        strayed = true;
    } else if (!here->failed_) {
        here->text_ = located(file, line, message);
        here->failed_ = true;
    }
}

}  // namespace opkit
