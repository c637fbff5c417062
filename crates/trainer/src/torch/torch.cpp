// All files as one for the compiler, which spends most of its time on libtorch's headers.

#include "context.cpp"
#include "decoder/capped.cpp"
#include "decoder/dropout.cpp"
#include "fused/batch_norm.cpp"
#include "profiler.cpp"
#include "program/executor.cpp"
#include "program/recompute.cpp"
