// One update of a contiguous range of weights: clip, unscale, `torch.optim.SGD` (dampening 0), the moving average of
// the weights, and their copy in the format that the network computes with. Each value is read and written once.
// Numbers that depend on the gradient are read on the device, so that the host never waits for them.

struct Sgd {
    // (len), f32; null if absent.
    float *weights;
    const float *gradient;
    float *velocity;
    float *average;
    // (cast), stored as the kernel's T: the copy of the first weights.
    void *working;
    // One f32 each: the gradient's norm, and the loss scale.
    const float *norm;
    const float *loss_scale;
    long long len;
    // Number of weights with weight decay: the first ones.
    long long decayed;
    long long cast;
    // The norm to clip to; 0: no clipping.
    double clip;
    float lr;
    float momentum;
    float weight_decay;
    // Weight of the new weights in their average; 1 replaces it.
    float share;
    bool nesterov;
    // The type T: 0 f32, 1 bf16, 2 f16.
    int element;
};

// Added to the norm when clipping; torch's constant.
constexpr double CLIP_EPSILON = 1e-6;

// Values that are the same for all weights.
struct Common {
    bool finite;
    float factor;
};

__device__ inline Common common(const Sgd &n) {
    const double norm = *n.norm;
    double factor = 1.0;
    if (n.clip > 0.0) {
        const double most = n.clip / (norm + CLIP_EPSILON);
        factor = most < 1.0 ? most : 1.0;
    }
    if (n.loss_scale) factor /= (double)*n.loss_scale;
    // Infinity minus infinity is NaN.
    return {norm - norm == 0.0, (float)factor};
}

struct Values {
    float weight;
    float velocity;
    float average;
};

__device__ inline void step(const Sgd &n, Common common, bool decays, float gradient, Values &at) {
    // A gradient that is not finite does not change the weights; their average is updated anyway.
    if (common.finite) {
        const float decay = decays ? n.weight_decay : 0.0f;
        gradient = gradient * common.factor + decay * at.weight;
        if (n.velocity) {
            at.velocity = n.momentum * at.velocity + gradient;
            gradient = n.nesterov ? gradient + n.momentum * at.velocity : at.velocity;
        }
        at.weight -= n.lr * gradient;
    }
    if (n.share == 1.0f) {
        at.average = at.weight;
    } else {
        at.average += n.share * (at.weight - at.average);
    }
}

// Updates the V values from `at` on.
template <class T, int V> __device__ inline void update(const Sgd &n, Common common, long long at) {
    typedef Pack<float, V> Floats;
    const Floats gradient = *reinterpret_cast<const Floats *>(n.gradient + at);
    Floats weights = *reinterpret_cast<const Floats *>(n.weights + at);
    Floats velocity = {}, average = {};
    Pack<T, V> working;
    if (n.velocity) velocity = *reinterpret_cast<const Floats *>(n.velocity + at);
    if (n.average) average = *reinterpret_cast<const Floats *>(n.average + at);
    for (int i = 0; i < V; i++) {
        Values values = {weights.values[i], velocity.values[i], average.values[i]};
        step(n, common, at + i < n.decayed, gradient.values[i], values);
        weights.values[i] = values.weight;
        velocity.values[i] = values.velocity;
        average.values[i] = values.average;
        write(working.values[i], values.weight);
    }
    *reinterpret_cast<Floats *>(n.weights + at) = weights;
    if (n.velocity) *reinterpret_cast<Floats *>(n.velocity + at) = velocity;
    if (n.average) *reinterpret_cast<Floats *>(n.average + at) = average;
    if (!n.working) return;
    T *to = static_cast<T *>(n.working) + at;
    if (at + V <= n.cast) {
        *reinterpret_cast<Pack<T, V> *>(to) = working;
    } else {
        for (int i = 0; i < V; i++)
            if (at + i < n.cast) to[i] = working.values[i];
    }
}

__device__ inline bool is_aligned(const void *pointer, int bytes) {
    return reinterpret_cast<unsigned long long>(pointer) % bytes == 0;
}

template <class T> __device__ void sgd(const Sgd &n) {
    const Common found = common(n);
    const bool wide = is_aligned(n.weights, 16) && is_aligned(n.gradient, 16) &&
                      is_aligned(n.velocity, 16) && is_aligned(n.average, 16) &&
                      is_aligned(n.working, 4 * sizeof(T));
    const long long step = (long long)gridDim.x * blockDim.x;
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long packs = wide ? n.len / 4 : 0;
    for (long long pack = first; pack < packs; pack += step) update<T, 4>(n, found, pack * 4);
    for (long long at = packs * 4 + first; at < n.len; at += step) update<T, 1>(n, found, at);
}

KERNEL(sgd_f32, Sgd) { sgd<F32>(n); }
KERNEL(sgd_bf16, Sgd) { sgd<Bf16>(n); }
KERNEL(sgd_f16, Sgd) { sgd<F16>(n); }
