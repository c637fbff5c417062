// Arguments of the BatchNorm kernels, for NVRTC, for the host's copy of the kernels and for the trainer, which fills
// them in. The same declarations are in batch_norm.rs, with comments on the members.

struct Shape {
    long long rows;
    long long channels;
    // Bytes and kind of a value: 0 f32, 1 bf16, 2 f16.
    int element;
};

struct BatchNorm {
    // (rows, channels), stored as the kernel's T; null if absent.
    const void *x;
    const void *residual;
    void *y;
    const void *y_gradient;
    void *x_gradient;
    void *residual_gradient;
    // (channels), f32.
    const float *scale;
    const float *shift;
    float *mean;
    float *inverse_deviation;
    float *batch_mean;
    float *batch_variance;
    float *scale_gradient;
    float *shift_gradient;
    // (chunks, 2, channels), f32.
    float *workspace;
    Shape shape;
    long long chunks;
    // Rows of every chunk except the last.
    long long chunk_rows;
    float epsilon;
    bool relu;
};
