// opk_fail: what a kernel says went wrong, from whatever thread it says it.
#pragma once

#include <cstdint>
#include <string>

namespace opkit {

// What one call of a kernel has reported. The first report counts.
class Report {
public:
    Report();   // from now on, opk_fail in this thread reports here
    ~Report();  // ... and again where it did before
    Report(const Report&) = delete;
    Report& operator=(const Report&) = delete;

    bool failed() const;
    std::string text() const;  // "message (file:line)"

private:
    friend class Reporting;
    friend void fail(const char*, int32_t, const char*, ...);
    bool strayed() const;
    Report* outer_;
    uint64_t strays_before_;
    std::string text_;
    bool failed_ = false;
};

// While it lives, opk_fail in this thread reports to a call that another thread made.
class Reporting {
public:
    explicit Reporting(Report* report);
    ~Reporting();
    static Report* current();

private:
    Report* before_;
};

void fail(const char* file, int32_t line, const char* format, ...);

}  // namespace opkit
