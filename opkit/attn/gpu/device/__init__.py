"""What runs on the GPU: functions in Triton and Gluon. Nothing here is imported before a kernel is called."""
