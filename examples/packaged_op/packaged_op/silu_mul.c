void silu_mul(const T* gate, const T* up, T* out, int64_t gate_numel) {
    for (int64_t i = 0; i < gate_numel; i++) {
        const float x = (float)gate[i];
        out[i] = (T)(x / (1 + expf(-x)) * (float)up[i]);
    }
}
