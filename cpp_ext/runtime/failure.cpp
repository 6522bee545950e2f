#include "failure.hpp"

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace opkit {
namespace {

thread_local Report* here = nullptr;
std::mutex writing;

// A thread that an OpenMP region started belongs to no call that we know of. What it says fails every call that is
// running then: better one too many than a wrong result.
std::string stray;
std::atomic<uint64_t> strays{0};

std::string located(const char* file, int32_t line, const char* message) {
    return std::string(message) + " (" + file + ":" + std::to_string(line) + ")";
}

}  // namespace

Report::Report() : outer_(here), strays_before_(strays.load(std::memory_order_acquire)) { here = this; }

Report::~Report() { here = outer_; }

bool Report::strayed() const { return strays.load(std::memory_order_acquire) != strays_before_; }

bool Report::failed() const { return failed_ || strayed(); }

std::string Report::text() const {
    std::lock_guard<std::mutex> lock(writing);
    return failed_ ? text_ : stray;
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
        stray = located(file, line, message);
        strays++;
    } else if (!here->failed_) {
        here->text_ = located(file, line, message);
        here->failed_ = true;
    }
}

}  // namespace opkit
