// Runs a model in a process without Python.
//
//     runner package.pt2 cases [libopkit.so kernel.so...]
//
// A package that opkit made contains the kernels; for another one the runner loads their libraries first.
// Each folder in `cases` holds the model's inputs in0.bin, in1.bin, ...: float32, written as rank, sizes, data. The
// outputs are written next to them in the same form.
#include <ATen/ops/from_blob.h>
#include <dirent.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

[[noreturn]] static void fail(const std::string& message) {
    fprintf(stderr, "runner: %s\n", message.c_str());
    exit(1);
}

// Defines the operators of some libraries in torch: what `import my_ops` does in Python.
static void register_kernels(const char* runtime, char** first, char** last) {
    void* opkit = dlopen(runtime, RTLD_NOW);
    if (opkit == nullptr) fail(dlerror());
    using Register = int (*)(const char* path, char* error, size_t size);
    auto opkit_register = reinterpret_cast<Register>(dlsym(opkit, "opkit_register"));
    if (opkit_register == nullptr) fail(dlerror());
    char error[1024];
    for (; first < last; first++)
        if (opkit_register(*first, error, sizeof error) != 0) fail(error);
}

static bool read(const std::string& path, at::Tensor& tensor) {
    std::ifstream file(path, std::ios::binary);
    int64_t rank = 0;
    if (!file.read(reinterpret_cast<char*>(&rank), sizeof rank)) return false;
    std::vector<int64_t> sizes(static_cast<size_t>(rank));
    file.read(reinterpret_cast<char*>(sizes.data()), static_cast<std::streamsize>(rank * sizeof(int64_t)));
    int64_t count = 1;
    for (int64_t size : sizes) count *= size;
    std::vector<float> data(static_cast<size_t>(count));
    if (!file.read(reinterpret_cast<char*>(data.data()), static_cast<std::streamsize>(count * sizeof(float))))
        fail(path + " is cut off");
    tensor = at::from_blob(data.data(), sizes, at::kFloat).clone();
    return true;
}

static void write(const std::string& path, const at::Tensor& given) {
    const at::Tensor tensor = given.to(at::kFloat).contiguous();
    const int64_t rank = tensor.dim();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&rank), sizeof rank);
    file.write(reinterpret_cast<const char*>(tensor.sizes().data()), static_cast<std::streamsize>(rank * sizeof(int64_t)));
    file.write(static_cast<const char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
    if (!file) fail(path + " cannot be written");
}

static void run(torch::inductor::AOTIModelPackageLoader& model, const std::string& folder) {
    std::vector<at::Tensor> inputs;
    at::Tensor tensor;
    while (read(folder + "/in" + std::to_string(inputs.size()) + ".bin", tensor)) inputs.push_back(tensor);
    const std::vector<at::Tensor> outputs = model.run(inputs);
    for (size_t i = 0; i < outputs.size(); i++) write(folder + "/out" + std::to_string(i) + ".bin", outputs[i]);
}

static std::vector<std::string> folders_in(const std::string& path) {
    std::vector<std::string> found;
    DIR* directory = opendir(path.c_str());
    if (directory == nullptr) fail(path + " is no folder");
    while (const dirent* entry = readdir(directory))
        if (entry->d_name[0] != '.') found.push_back(path + "/" + entry->d_name);
    closedir(directory);
    return found;
}

static void refuse_python() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
        if (line.find("libpython") != std::string::npos || line.find("torch_python") != std::string::npos) fail(line);
    if (dlsym(RTLD_DEFAULT, "Py_Initialize") != nullptr) fail("there is an interpreter in this process");
}

int main(int argc, char** argv) {
    if (argc < 3) fail("usage: runner package.pt2 cases [libopkit.so kernel.so...]");
    try {
        if (argc > 3) register_kernels(argv[3], argv + 4, argv + argc);
        torch::inductor::AOTIModelPackageLoader model(argv[1]);
        for (const std::string& folder : folders_in(argv[2])) run(model, folder);
    } catch (const std::exception& problem) {
        fail(problem.what());
    }
    refuse_python();
    puts("no Python in this process");
}
