// BatchNorm of a matrix (rows, channels), stored row by row, with the operations after it in a residual network:
// y = relu(scale * (x - mean) / sqrt(variance + epsilon) + shift + residual).
// Ioffe and Szegedy 2015 (arXiv 1502.03167), algorithm 1 and the gradients of section 3.
//
// All kernels have the same layout. A thread handles V neighbouring channels and every n-th row; a block's threads are
// arranged as (blockDim.x packs of channels) x (blockDim.y lanes of rows). A sum over rows is computed by each thread,
// then over a block's lanes, then over the blocks by a second kernel, always in the same order: the bits are the same
// in every run, in whatever order the machine works.

// Threads of a block that computes sums.
static const int THREADS = 256;
// Channels and lanes of such a block in the second step.
static const int COLUMNS = 32;
static const int LANES = THREADS / COLUMNS;
// Chunks whose results a lane of the second step loads at once: a load takes much longer than the arithmetic.
static const int AHEAD = 16;

// State of Welford's method for some values.
struct Moments {
    float count;
    float mean;
    // Sum of squared distances from the mean.
    float square;
};

// Combines two: Chan, Golub and LeVeque 1979, "Updating formulae", eq. 2.1.
__device__ inline Moments together(Moments a, Moments b) {
    if (b.count == 0.0f) return a;
    if (a.count == 0.0f) return b;
    const float count = a.count + b.count;
    const float distance = b.mean - a.mean;
    const float share = b.count / count;
    return {count, a.mean + distance * share,
            a.square + b.square + distance * distance * (a.count * share)};
}

__device__ inline long long least(long long a, long long b) { return a < b ? a : b; }

// The first of a thread's V channels.
template <int V> __device__ inline long long first_channel() {
    return ((long long)blockIdx.x * blockDim.x + threadIdx.x) * V;
}

template <class T, int V> __device__ inline Pack<T, V> load(const void *values, long long at) {
    return *reinterpret_cast<const Pack<T, V> *>(static_cast<const T *>(values) + at);
}

template <class T, int V> __device__ inline void store(void *values, long long at, Pack<T, V> pack) {
    *reinterpret_cast<Pack<T, V> *>(static_cast<T *>(values) + at) = pack;
}

// The normalisation of one channel.
struct Normal {
    float mean;
    float factor;
    float shift;

    __device__ float of(float x) const { return multiply_add(x - mean, factor, shift); }
};

template <int V> __device__ inline void normals(const BatchNorm &n, long long channel, Normal (&to)[V]) {
    for (int i = 0; i < V; i++) {
        const long long at = channel + i;
        to[i] = {n.mean[at], n.scale[at] * n.inverse_deviation[at], n.shift[at]};
    }
}

// Forward, step 1: mean and squares of each chunk of rows.
template <class T, int V> __device__ void moments_of_chunks(const BatchNorm &n) {
    __shared__ float counts[THREADS], means[V][THREADS], squares[V][THREADS];
    const long long channel = first_channel<V>();
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const long long start = blockIdx.y * n.chunk_rows;
    const long long end = least(start + n.chunk_rows, n.shape.rows);

    float count = 0.0f, mean[V] = {}, square[V] = {};
    if (channel < n.shape.channels) {
#pragma unroll 4
        for (long long row = start + threadIdx.y; row < end; row += blockDim.y) {
            const Pack<T, V> x = load<T, V>(n.x, row * n.shape.channels + channel);
            count += 1.0f;
            const float share = 1.0f / count;
            for (int i = 0; i < V; i++) {
                const float distance = read(x.values[i]) - mean[i];
                mean[i] += distance * share;
                square[i] += distance * (read(x.values[i]) - mean[i]);
            }
        }
    }
    counts[thread] = count;
    for (int i = 0; i < V; i++) {
        means[i][thread] = mean[i];
        squares[i][thread] = square[i];
    }
    for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y >= half) continue;
        const int other = thread + half * blockDim.x;
        const float own_count = counts[thread], other_count = counts[other];
        for (int i = 0; i < V; i++) {
            const Moments both = together({own_count, means[i][thread], squares[i][thread]},
                                          {other_count, means[i][other], squares[i][other]});
            means[i][thread] = both.mean;
            squares[i][thread] = both.square;
        }
        counts[thread] = own_count + other_count;
    }
    if (threadIdx.y == 0 && channel < n.shape.channels) {
        float *partial = n.workspace + blockIdx.y * 2 * n.shape.channels + channel;
        for (int i = 0; i < V; i++) {
            partial[i] = means[i][thread];
            partial[n.shape.channels + i] = squares[i][thread];
        }
    }
}

// The results of a lane's next AHEAD chunks, from `first`; zeros after the last chunk.
__device__ inline void load_partial(const BatchNorm &n, long long channel, long long first,
                                    float (&plain)[AHEAD], float (&other)[AHEAD]) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        const long long chunk = first + i * LANES;
        const bool is_there = chunk < n.chunks;
        const float *partial = n.workspace + (is_there ? chunk * 2 * n.shape.channels + channel : 0);
        plain[i] = is_there ? partial[0] : 0.0f;
        other[i] = is_there ? partial[n.shape.channels] : 0.0f;
    }
}

// Forward, step 2: the moments of all rows. A block has COLUMNS channels and LANES lanes of chunks.
__device__ inline void moments_of_all(const BatchNorm &n) {
    __shared__ Moments lanes[LANES][COLUMNS];
    const long long channel = (long long)blockIdx.x * COLUMNS + threadIdx.x;

    Moments found = {0.0f, 0.0f, 0.0f};
    if (channel < n.shape.channels) {
        for (long long first = threadIdx.y; first < n.chunks; first += AHEAD * LANES) {
            float means[AHEAD], squares[AHEAD];
            load_partial(n, channel, first, means, squares);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const long long start = (first + i * LANES) * n.chunk_rows;
                const float count = (float)least(n.chunk_rows, n.shape.rows - start);
                if (count > 0.0f) found = together(found, {count, means[i], squares[i]});
            }
        }
    }
    lanes[threadIdx.y][threadIdx.x] = found;
    __syncthreads();
    if (threadIdx.y != 0 || channel >= n.shape.channels) return;
    for (int lane = 1; lane < LANES; lane++) found = together(found, lanes[lane][threadIdx.x]);
    n.mean[channel] = found.mean;
    n.inverse_deviation[channel] = 1.0f / sqrtf(found.square / found.count + n.epsilon);
    // Inputs of torch's running averages; the variance of a single row is NaN, as in torch.
    n.batch_mean[channel] = found.mean;
    n.batch_variance[channel] = found.square / (found.count - 1.0f);
}

// Forward, step 3: y.
template <class T, int V> __device__ void normalise(const BatchNorm &n) {
    const long long channel = first_channel<V>();
    if (channel >= n.shape.channels) return;
    Normal normal[V];
    normals<V>(n, channel, normal);
    const long long step = (long long)gridDim.y * blockDim.y;
#pragma unroll 2
    for (long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y; row < n.shape.rows; row += step) {
        const long long at = row * n.shape.channels + channel;
        const Pack<T, V> x = load<T, V>(n.x, at);
        Pack<T, V> residual = {}, y;
        if (n.residual) residual = load<T, V>(n.residual, at);
        for (int i = 0; i < V; i++) {
            float value = normal[i].of(read(x.values[i]));
            if (n.residual) value += read(residual.values[i]);
            // Written so that NaN stays NaN.
            write(y.values[i], n.relu && value <= 0.0f ? 0.0f : value);
        }
        store<T, V>(n.y, at, y);
    }
}

// The gradient before the ReLU. Without a residual, its sign is computed again from x, which is loaded anyway, so that
// y need not be read.
template <class T, int V>
__device__ inline void before_relu(const BatchNorm &n, const Normal (&normal)[V], const Pack<T, V> &x,
                                   long long at, float (&gradient)[V]) {
    const Pack<T, V> y_gradient = load<T, V>(n.y_gradient, at);
    Pack<T, V> y = {};
    if (n.relu && n.y) y = load<T, V>(n.y, at);
    for (int i = 0; i < V; i++) {
        const float output = n.y ? read(y.values[i]) : normal[i].of(read(x.values[i]));
        gradient[i] = n.relu && output <= 0.0f ? 0.0f : read(y_gradient.values[i]);
    }
}

// Backward, step 1: for each chunk of rows the sums of the gradient, and of the gradient times (x - mean).
template <class T, int V> __device__ void sums_of_chunks(const BatchNorm &n) {
    __shared__ float plain[V][THREADS], weighted[V][THREADS];
    const long long channel = first_channel<V>();
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const long long start = blockIdx.y * n.chunk_rows;
    const long long end = least(start + n.chunk_rows, n.shape.rows);

    float sum[V] = {}, product[V] = {};
    if (channel < n.shape.channels) {
        Normal normal[V];
        normals<V>(n, channel, normal);
#pragma unroll 2
        for (long long row = start + threadIdx.y; row < end; row += blockDim.y) {
            const long long at = row * n.shape.channels + channel;
            const Pack<T, V> x = load<T, V>(n.x, at);
            float gradient[V];
            before_relu<T, V>(n, normal, x, at, gradient);
            for (int i = 0; i < V; i++) {
                sum[i] += gradient[i];
                product[i] += gradient[i] * (read(x.values[i]) - normal[i].mean);
            }
        }
    }
    for (int i = 0; i < V; i++) {
        plain[i][thread] = sum[i];
        weighted[i][thread] = product[i];
    }
    for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y >= half) continue;
        const int other = thread + half * blockDim.x;
        for (int i = 0; i < V; i++) {
            plain[i][thread] += plain[i][other];
            weighted[i][thread] += weighted[i][other];
        }
    }
    if (threadIdx.y == 0 && channel < n.shape.channels) {
        float *partial = n.workspace + blockIdx.y * 2 * n.shape.channels + channel;
        for (int i = 0; i < V; i++) {
            partial[i] = plain[i][thread];
            partial[n.shape.channels + i] = weighted[i][thread];
        }
    }
}

// Backward, step 2: the gradients of shift and scale.
__device__ inline void sums_of_all(const BatchNorm &n) {
    __shared__ float plain[LANES][COLUMNS], weighted[LANES][COLUMNS];
    const long long channel = (long long)blockIdx.x * COLUMNS + threadIdx.x;

    float sum = 0.0f, product = 0.0f;
    if (channel < n.shape.channels) {
        for (long long first = threadIdx.y; first < n.chunks; first += AHEAD * LANES) {
            float sums[AHEAD], products[AHEAD];
            load_partial(n, channel, first, sums, products);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (first + i * LANES < n.chunks) {
                    sum += sums[i];
                    product += products[i];
                }
            }
        }
    }
    plain[threadIdx.y][threadIdx.x] = sum;
    weighted[threadIdx.y][threadIdx.x] = product;
    __syncthreads();
    if (threadIdx.y != 0 || channel >= n.shape.channels) return;
    for (int lane = 1; lane < LANES; lane++) {
        sum += plain[lane][threadIdx.x];
        product += weighted[lane][threadIdx.x];
    }
    n.shift_gradient[channel] = sum;
    n.scale_gradient[channel] = product * n.inverse_deviation[channel];
}

// Backward, step 3: the gradients of x and, if requested, of the residual.
template <class T, int V> __device__ void gradients(const BatchNorm &n) {
    const long long channel = first_channel<V>();
    if (channel >= n.shape.channels) return;
    Normal normal[V];
    normals<V>(n, channel, normal);
    float mean[V], slope[V];
    const float share = 1.0f / (float)n.shape.rows;
    for (int i = 0; i < V; i++) {
        mean[i] = n.shift_gradient[channel + i] * share;
        slope[i] = n.scale_gradient[channel + i] * n.inverse_deviation[channel + i] * share;
    }
    const long long step = (long long)gridDim.y * blockDim.y;
    for (long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y; row < n.shape.rows; row += step) {
        const long long at = row * n.shape.channels + channel;
        const Pack<T, V> x = load<T, V>(n.x, at);
        float gradient[V];
        before_relu<T, V>(n, normal, x, at, gradient);
        Pack<T, V> x_gradient, residual_gradient;
        for (int i = 0; i < V; i++) {
            const float distance = read(x.values[i]) - normal[i].mean;
            write(x_gradient.values[i], (gradient[i] - mean[i] - distance * slope[i]) * normal[i].factor);
            write(residual_gradient.values[i], gradient[i]);
        }
        store<T, V>(n.x_gradient, at, x_gradient);
        if (n.residual_gradient) store<T, V>(n.residual_gradient, at, residual_gradient);
    }
}

KERNEL_WITH_BARRIERS(batch_norm_moments_of_all, BatchNorm) { moments_of_all(n); }
KERNEL_WITH_BARRIERS(batch_norm_sums_of_all, BatchNorm) { sums_of_all(n); }

#define BATCH_NORM(T, V, suffix)                                                                       \
    KERNEL_WITH_BARRIERS(batch_norm_moments_of_chunks_##suffix, BatchNorm) { moments_of_chunks<T, V>(n); }\
    KERNEL(batch_norm_normalise_##suffix, BatchNorm) { normalise<T, V>(n); }                           \
    KERNEL_WITH_BARRIERS(batch_norm_sums_of_chunks_##suffix, BatchNorm) { sums_of_chunks<T, V>(n); }   \
    KERNEL(batch_norm_gradients_##suffix, BatchNorm) { gradients<T, V>(n); }

// One channel per thread, for any number of channels; and packs of 16 bytes, if they divide the number of channels.
BATCH_NORM(F32, 1, f32)
BATCH_NORM(F32, Most<F32>::values, f32_wide)
BATCH_NORM(Bf16, 1, bf16)
BATCH_NORM(Bf16, Most<Bf16>::values, bf16_wide)
BATCH_NORM(F16, 1, f16)
BATCH_NORM(F16, Most<F16>::values, f16_wide)
