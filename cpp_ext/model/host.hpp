// A call of an entry.
#pragma once

#include <stdexcept>

#include "model.hpp"
#include "threads.hpp"

namespace opkit::model {

// What a program asks for, and the memory of its buffers.
struct Host : opk_host {
    const Entry& entry;
    std::vector<Memory> memory;
    std::vector<Tensor> outputs;
    std::string failure;

    explicit Host(const Entry& of)
        : opk_host{}, entry(of), memory(static_cast<size_t>(of.buffers_)), outputs(static_cast<size_t>(of.outputs_)) {
        const Threads found = threads();
        segments = {found.parallel, found.number, found.count, {}, entry.functions_.data()};
        opk_host::device = entry.device_.number();
        opk_host::launch = [](opk_host* host, int64_t kernel, int64_t programs, void** parameters) {
            Host& self = of_host(host);
            return self.guarded(
                [&] { self.start(*self.entry.binaries_.at(static_cast<size_t>(kernel)), programs, parameters); });
        };
        opk_host::allocate = [](opk_host* host, int64_t buffer, const opk_tensor* layout) -> void* {
            return of_host(host).guarded([&] { of_host(host).make(buffer, *layout); }) ? nullptr
                                                                                       : of_host(host).at(buffer).get();
        };
        opk_host::release = [](opk_host* host, int64_t buffer) { of_host(host).at(buffer).reset(); };
        opk_host::call = [](opk_host* host, int64_t number, const opk_passed* arguments, int64_t count, opk_result* results,
                            int64_t result_count) {
            Host& self = of_host(host);
            return self.guarded([&] {
                self.run(self.entry.calls_.at(static_cast<size_t>(number)), arguments, count, results, result_count);
            });
        };
        opk_host::give = [](opk_host* host, int64_t output, int64_t buffer, const opk_tensor* tensor) {
            of_host(host).guarded([&] { of_host(host).take(output, buffer, *tensor); });
        };
    }

    static Host& of_host(opk_host* host) { return *static_cast<Host*>(host); }
    Memory& at(int64_t buffer) { return memory.at(static_cast<size_t>(buffer)); }

    template <class F>
    int32_t guarded(const F& work) {
        try {
            work();
            return 0;
        } catch (const std::exception& error) {
            if (failure.empty()) failure = error.what();
            return 1;
        }
    }

    void make(int64_t buffer, const opk_tensor& layout) { at(buffer) = entry.device_.empty(layout).memory; }

    void make(opk_result& result) {
        if (result.buffer < 0 || result.tensor.data != nullptr) return;
        make(result.buffer, result.tensor);
        result.tensor.data = at(result.buffer).get();
    }

    // Makes a tensor a result of a call of `name`. Throws std::runtime_error where the program says another dtype or other sizes.
    void set(const std::string& name, const Tensor& tensor, opk_result& result);

    void start(const launch::Binary& binary, int64_t programs, void** parameters) {
        if (programs <= 0) return;
        const launch::Driver& driver = binary.driver();
        driver.enter(device);
        driver(driver.launch, binary.function(device), static_cast<uint32_t>(programs), 1u, 1u,
               static_cast<uint32_t>(binary.properties().threads), 1u, 1u, static_cast<uint32_t>(binary.properties().shared),
               entry.device_.stream(), parameters, static_cast<void**>(nullptr));
    }

    void run(const Entry::Call& call, const opk_passed* arguments, int64_t count, opk_result* results,
             int64_t result_count) {
        if (call.kernel) return run_kernel(call, arguments, count, results);
        if (call.flow) return (this->*call.flow)(Arguments(arguments, count), results, result_count);
        for (int64_t i = 0; i < result_count && call.own; ++i) make(results[i]);
        if (call.own) return call.own(Arguments(arguments, count, entry.attention_functions_), results);
        char error[1024] = "";
        const opkit_operators& host = *entry.host_;
        const int32_t failed = host.call(host.context, call.name.c_str(), call.overload.c_str(), arguments, count, results,
                                         result_count, error, sizeof error);
        for (int64_t i = 0; i < result_count; ++i)
            if (results[i].owner != nullptr && results[i].buffer >= 0)
                at(results[i].buffer) = owned(host, results[i].owner);
        if (failed) throw std::runtime_error(call.name + ": " + error);
    }

    // An operator's kernel, whose library is in the file.
    void run_kernel(const Entry::Call& call, const opk_passed* passed, int64_t count, opk_result* results);

    // Control flow operators (control_flow.cpp).
    void cond(const Arguments& arguments, opk_result* results, int64_t result_count);
    void switch_(const Arguments& arguments, opk_result* results, int64_t result_count);
    void invoke(const Arguments& arguments, opk_result* results, int64_t result_count);
    void while_loop(const Arguments& arguments, opk_result* results, int64_t result_count);
    void map(const Arguments& arguments, opk_result* results, int64_t result_count);
    void scan(const Arguments& arguments, opk_result* results, int64_t result_count);

    void set_all(const std::vector<Tensor>& tensors, opk_result* results, int64_t result_count);
    void rows(const Entry& body, const std::vector<opk_tensor>& init, const std::vector<opk_tensor>& over,
              const std::vector<opk_tensor>& additional, opk_result* results, int64_t result_count);

    void take(int64_t output, int64_t buffer, const opk_tensor& tensor) {
        Tensor& to = outputs.at(static_cast<size_t>(output));
        if (buffer >= 0 && at(buffer) && at(buffer).use_count() == 1) {
            to = Tensor::view(tensor);
            to.memory = at(buffer);
        } else {
            to = entry.device_.empty(tensor);
            entry.device_.copy(tensor, to.described());
        }
    }
};

}  // namespace opkit::model
