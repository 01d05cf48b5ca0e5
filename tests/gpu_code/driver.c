/* What PyTorch asks of CUDA's runtime and driver before it makes a tensor without memory: one GPU, and nothing went wrong. */
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { (void)device; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  (void)flags; (void)priority; *stream = (void *)8; return 0;
}
int cudaStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  (void)device; *flags = 0; *active = 0; return 0;
}
int cuGetErrorString(int error, const char **text) { (void)error; *text = "no driver"; return 0; }
