// Calls of a launcher into Python: to make an entry for a call that no entry serves.
#pragma once

#include <pybind11/pybind11.h>

#include "launcher.hpp"

namespace opkit::launch {

// A call as Python sees it; only as long as the launcher waits for the answer.
class PythonCall {
public:
    PythonCall(const Launcher& launcher, const Frame& frame) : launcher_(&launcher), frame_(&frame) {}
    void end() { frame_ = nullptr; }

    pybind11::list values() const;
    int32_t device() const { return frame().device; }
    bool capturing() const;
    void launch(const Entry& entry) const;
    double time(const Entry& entry, double warmup, double run, const std::vector<int64_t>& written) const;

private:
    const Frame& frame() const;  // throws std::runtime_error once the call has ended

    const Launcher* launcher_;
    const Frame* frame_;
};

// Calls `function` with a PythonCall, under the GIL. What it raises becomes a std::runtime_error that says what and where.
Launcher::Miss ask_python(pybind11::object function);

// "TypeError: text (file.py:12)": the innermost line that is neither opkit's nor Triton's nor torch's.
std::string text_of(const pybind11::error_already_set& error);

}  // namespace opkit::launch
