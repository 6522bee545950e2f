"""Find functions of installed shared libraries, and make kernels that call them."""
