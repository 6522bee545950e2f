#include "execute.hpp"

#include <cstdio>
#include <exception>
#include <string>

#include "call.hpp"
#include "failure.hpp"

namespace opkit {
namespace {

bool run(Call& call, opk_message& message) {
    Report report;
    const char* text = nullptr;
    const int32_t code = call.run(&text);
    if (report.failed())
        snprintf(message.text, sizeof message.text, "%s", report.text().c_str());
    else if (text != nullptr)
        snprintf(message.text, sizeof message.text, "%s", text);
    else if (code != 0)
        snprintf(message.text, sizeof message.text, "it returned the error code %d", code);
    else
        return true;
    return false;
}

int32_t execute(Call& call, const int64_t* layout, void** outputs, opk_message& message) {
    if (!call.read_tensors() || !call.bind_sizes() || !call.find_layout(layout) || !call.choose_instance())
        return OPK_REFUSED;
    const bool empty = call.nothing_to_write();
    call.allocate_outputs();
    if (!empty) {
        call.make_contiguous();
        if (!run(call, message)) return OPK_FAILED;
        call.copy_back();
    }
    call.give_outputs(outputs);
    return OPK_DONE;
}

}  // namespace

int32_t execute(const opk_kernel* kernel, const opk_input* inputs, const int64_t* layout, void** outputs,
                opk_message* message) {
    try {
        Call call(*kernel, inputs, *message);
        const int32_t status = execute(call, layout, outputs, *message);
        if (status != OPK_FAILED) return status;
    } catch (const TorchError& error) {
        const auto reason = shim().torch_exception_get_what_without_backtrace;
        snprintf(message->text, sizeof message->text, "torch failed while %s%s%s", error.doing, reason ? ": " : "",
                 reason ? reason() : "");
    } catch (const std::exception& error) {
        snprintf(message->text, sizeof message->text, "%s", error.what());
    } catch (...) {
        snprintf(message->text, sizeof message->text, "it threw something that is no std::exception");
    }
    name_kernel(*kernel, *message);
    return OPK_FAILED;
}

void name_kernel(const opk_kernel& kernel, opk_message& message) {
    const std::string text = message.text;
    snprintf(message.text, sizeof message.text, "%s (kernel %s): %s", kernel.operator_name, kernel.kernel_name, text.c_str());
}

}  // namespace opkit
