//! What is known about PyTorch's operators: their arithmetic, which tensors autograd keeps for the backward pass, and
//! their number format under autocast.
//!
//! Sources, of PyTorch 2.11: `tools/autograd/derivatives.yaml` for what is kept, `aten/src/ATen/autocast_mode.h` for
//! the lists of autocast on CUDA.

use crate::graph::{Argument, GraphNode};

/// Kind of an operator, which decides how its arithmetic is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OperatorKind {
    /// Convolution, also transposed.
    Convolution,
    /// Linear layer.
    Linear,
    /// Product of matrices.
    MatrixProduct,
    /// Scaled dot-product attention.
    Attention,
    /// LSTM, GRU and plain recurrent layers.
    Recurrent,
    /// BatchNorm.
    BatchNorm,
    /// ReLU.
    Relu,
    /// Sum of two tensors.
    Add,
    /// Pooling.
    Pool,
    /// Anything else: only the data that it moves are counted.
    Other,
}

/// Something that an operator keeps for its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    /// The tensors of this argument.
    Argument(&'static str),
    /// The first argument, if the second one needs a gradient.
    Factor(&'static str, &'static str),
    /// All tensors among the arguments.
    Arguments,
    /// A result, by index.
    Result(usize),
    /// A byte per value of the result: which values a dropout keeps.
    Mask,
    /// 8 bytes per value of the result: where max pooling found it.
    Indices,
    /// Mean and deviation of each channel.
    ChannelStatistics,
    /// Mean and deviation of each group of channels and sample.
    GroupStatistics,
    /// Mean and deviation of each normalised row.
    RowStatistics,
    /// Logarithm of each row's sum in attention.
    RowSums,
    /// Gates and states of recurrent layers.
    Gates,
}

/// Whether the result is a tensor of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// It is.
    New,
    /// It is a view of the first tensor.
    View,
    /// It is a view where the strides allow that, else a copy.
    Reshaped,
    /// It is the first tensor itself if type and strides are the same, else a copy.
    Converted,
}

/// Number format of an operator's floating-point tensors under autocast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AutocastRule {
    /// The arguments are converted to 16 bits.
    Half,
    /// The arguments are converted to float32.
    Single,
    /// The arguments stay as they are, and the result is float32.
    SingleResult,
    /// The format of the first argument; the others are statistics and parameters in float32.
    First,
    /// The widest one of the arguments.
    Widest,
}

/// What is known about an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OperatorRule {
    pub(crate) kind: OperatorKind,
    pub(crate) saved: &'static [Saved],
    pub(crate) storage: Storage,
    /// Whether it writes into one of its tensors, see [`GraphNode::overwrites`].
    pub(crate) is_in_place: bool,
}

/// Name without the namespace and the mark of operators that work in place.
pub(crate) fn base_name(operator: &str) -> &str {
    let name = operator.strip_prefix("aten::").unwrap_or(operator);
    match name.strip_suffix('_') {
        // `__and__` is a name of its own.
        Some(base) if !name.starts_with("__") => base,
        _ => name,
    }
}

impl OperatorRule {
    /// `None` for operators that are not known.
    pub(crate) fn of(node: &GraphNode) -> Option<Self> {
        let name = base_name(&node.operator);
        let is_in_place = node.overwrites().is_some();
        let (kind, saved) = match is_in_place {
            true => kept_in_place(name).or_else(|| kept(name)),
            false => kept(name),
        }
        .or_else(|| storage(name).map(|_| (OperatorKind::Other, &[][..])))?;
        let storage = storage(name).unwrap_or(Storage::New);
        let rule = Self { kind, saved, storage, is_in_place };
        match name {
            "dropout" | "native_dropout" if !drops(node) => {
                Some(Self { saved: &[], storage: Storage::View, ..rule })
            }
            // The mean of all values of a channel, which keeps nothing.
            "adaptive_avg_pool1d" | "adaptive_avg_pool2d" | "adaptive_avg_pool3d"
                if is_global(node) =>
            {
                Some(Self { saved: &[], ..rule })
            }
            "batch_norm" | "native_batch_norm"
                if node.argument("training") == Some(&Argument::Bool(false)) =>
            {
                Some(Self { saved: &[Saved::Argument("input")], ..rule })
            }
            _ => Some(rule),
        }
    }

    /// An operator that is not known: it is assumed to keep its arguments.
    pub(crate) const UNKNOWN: Self = Self {
        kind: OperatorKind::Other,
        saved: &[Saved::Arguments],
        storage: Storage::New,
        is_in_place: false,
    };
}

fn drops(node: &GraphNode) -> bool {
    node.argument("train") != Some(&Argument::Bool(false))
        && !matches!(node.argument("p"), Some(Argument::Float(0.0) | Argument::Int(0)))
}

fn is_global(node: &GraphNode) -> bool {
    match node.argument("output_size") {
        Some(Argument::List(sizes)) => sizes.iter().all(|size| *size == Argument::Int(1)),
        size => size == Some(&Argument::Int(1)),
    }
}

/// What operators keep that are different in place: the result, which replaces the argument.
fn kept_in_place(name: &str) -> Option<(OperatorKind, &'static [Saved])> {
    match name {
        "elu" | "celu" | "leaky_relu" | "hardtanh" | "relu6" => {
            Some((OperatorKind::Other, &[Saved::Result(0)]))
        }
        _ => None,
    }
}

fn kept(name: &str) -> Option<(OperatorKind, &'static [Saved])> {
    use OperatorKind as Kind;
    use Saved::{
        Argument, ChannelStatistics, Factor, Gates, GroupStatistics, Indices, Mask, Result,
        RowStatistics, RowSums,
    };
    Some(match name {
        "conv1d" | "conv2d" | "conv3d" | "conv_transpose1d" | "conv_transpose2d"
        | "conv_transpose3d" | "convolution" | "_convolution" => {
            // Both, also if only one of them has a gradient.
            (Kind::Convolution, &[Argument("input"), Argument("weight")])
        }
        "linear" => (Kind::Linear, &[Factor("input", "weight"), Factor("weight", "input")]),
        "addmm" => (Kind::Linear, &[Factor("mat1", "mat2"), Factor("mat2", "mat1")]),
        "mm" | "bmm" => (Kind::MatrixProduct, &[Factor("self", "mat2"), Factor("mat2", "self")]),
        "matmul" => (Kind::MatrixProduct, &[Factor("self", "other"), Factor("other", "self")]),
        "baddbmm" => {
            (Kind::MatrixProduct, &[Factor("batch1", "batch2"), Factor("batch2", "batch1")])
        }
        "einsum" => (Kind::MatrixProduct, &[Argument("tensors")]),
        "scaled_dot_product_attention" => (
            Kind::Attention,
            &[
                Argument("query"),
                Argument("key"),
                Argument("value"),
                Argument("attn_mask"),
                Result(0),
                RowSums,
            ],
        ),
        "lstm" | "gru" | "rnn_tanh" | "rnn_relu" => {
            (Kind::Recurrent, &[Argument("input"), Argument("params"), Result(0), Gates])
        }
        "batch_norm" | "native_batch_norm" => {
            (Kind::BatchNorm, &[Argument("input"), ChannelStatistics])
        }
        "instance_norm" | "group_norm" | "native_group_norm" => {
            (Kind::Other, &[Argument("input"), GroupStatistics])
        }
        "layer_norm" | "native_layer_norm" | "rms_norm" => {
            (Kind::Other, &[Argument("input"), RowStatistics])
        }
        "relu" => (Kind::Relu, &[Result(0)]),
        "add" | "sub" | "rsub" => (Kind::Add, &[]),
        "max_pool1d" | "max_pool2d" | "max_pool3d" => (Kind::Pool, &[Argument("self"), Indices]),
        "max_pool2d_with_indices"
        | "max_pool3d_with_indices"
        | "adaptive_max_pool1d"
        | "adaptive_max_pool2d"
        | "adaptive_max_pool3d" => (Kind::Pool, &[Argument("self"), Result(1)]),
        "avg_pool1d"
        | "avg_pool2d"
        | "avg_pool3d"
        | "adaptive_avg_pool1d"
        | "adaptive_avg_pool2d"
        | "adaptive_avg_pool3d" => (Kind::Pool, &[Argument("self")]),
        "dropout" | "native_dropout" => (Kind::Other, &[Mask]),
        "mul" | "multiply" | "outer" => {
            (Kind::Other, &[Factor("self", "other"), Factor("other", "self")])
        }
        "div" | "true_divide" | "divide" => {
            (Kind::Other, &[Factor("other", "self"), Factor("self", "other")])
        }
        "softmax" | "_softmax" | "log_softmax" | "_log_softmax" | "sigmoid" | "tanh" | "exp"
        | "expm1" | "sqrt" | "rsqrt" | "reciprocal" | "threshold" => (Kind::Other, &[Result(0)]),
        "gelu" | "silu" | "mish" | "hardswish" | "hardsigmoid" | "hardtanh" | "relu6" | "elu"
        | "selu" | "celu" | "leaky_relu" | "softplus" | "log_sigmoid" | "hardshrink"
        | "softshrink" | "glu" | "abs" | "sin" | "cos" | "tan" | "erf" | "log" | "log1p"
        | "log2" | "log10" | "square" | "clamp" | "clamp_min" | "clamp_max" | "prod" | "var"
        | "var_mean" | "cumprod" => (Kind::Other, &[Argument("self")]),
        "prelu" => (Kind::Other, &[Argument("self"), Factor("weight", "self")]),
        "pow" => (Kind::Other, &[Argument("self"), Argument("exponent")]),
        "std" | "std_mean" | "norm" | "linalg_vector_norm" | "logsumexp" | "amax" | "amin" => {
            (Kind::Other, &[Argument("self"), Result(0)])
        }
        "maximum" | "minimum" => (Kind::Other, &[Argument("self"), Argument("other")]),
        "max" | "min" | "topk" | "sort" | "median" | "kthvalue" => (Kind::Other, &[Result(1)]),
        "where" => (Kind::Other, &[Argument("condition")]),
        "masked_fill" => (Kind::Other, &[Argument("mask")]),
        "index" | "index_put" | "embedding" => (Kind::Other, &[Argument("indices")]),
        "gather" | "index_select" | "scatter" | "scatter_add" | "index_add" => {
            (Kind::Other, &[Argument("index")])
        }
        "grid_sampler" => (Kind::Other, &[Argument("input"), Argument("grid")]),
        "addcmul" => (Kind::Other, &[Factor("tensor1", "tensor2"), Factor("tensor2", "tensor1")]),
        "lerp" => (Kind::Other, &[Argument("weight")]),
        // Linear, or without a gradient. Masks of whole channels are small.
        "mean"
        | "sum"
        | "cumsum"
        | "cat"
        | "concat"
        | "stack"
        | "repeat"
        | "repeat_interleave"
        | "tile"
        | "pad"
        | "constant_pad_nd"
        | "roll"
        | "flip"
        | "rot90"
        | "tril"
        | "triu"
        | "neg"
        | "clone"
        | "copy"
        | "fill"
        | "zero"
        | "feature_dropout"
        | "pixel_shuffle"
        | "pixel_unshuffle"
        | "channel_shuffle"
        | "upsample_nearest1d"
        | "upsample_nearest2d"
        | "upsample_nearest3d"
        | "upsample_linear1d"
        | "upsample_bilinear2d"
        | "upsample_bicubic2d"
        | "upsample_trilinear3d"
        | "_upsample_bilinear2d_aa"
        | "_upsample_bicubic2d_aa"
        | "im2col"
        | "col2im"
        | "lift_fresh_copy"
        | "bernoulli"
        | "empty"
        | "empty_like"
        | "zeros"
        | "zeros_like"
        | "ones"
        | "ones_like"
        | "full"
        | "full_like"
        | "arange"
        | "linspace"
        | "eye"
        | "rand"
        | "rand_like"
        | "randn"
        | "randn_like"
        | "new_zeros"
        | "new_ones"
        | "new_full"
        | "new_empty"
        | "scalar_tensor"
        | "one_hot"
        | "eq"
        | "ne"
        | "lt"
        | "le"
        | "gt"
        | "ge"
        | "logical_and"
        | "logical_or"
        | "logical_not"
        | "bitwise_and"
        | "bitwise_or"
        | "bitwise_not"
        | "__and__"
        | "__or__"
        | "isnan"
        | "isinf"
        | "floor"
        | "ceil"
        | "round"
        | "trunc"
        | "sign"
        | "argmax"
        | "argmin"
        | "any"
        | "all"
        | "floor_divide"
        | "remainder" => (Kind::Other, &[]),
        _ => return None,
    })
}

/// `None` for operators whose results are always new.
fn storage(name: &str) -> Option<Storage> {
    Some(match name {
        "view" | "view_as" | "_unsafe_view" | "unflatten" | "transpose" | "permute" | "t"
        | "swapaxes" | "swapdims" | "movedim" | "mT" | "numpy_T" | "squeeze" | "unsqueeze"
        | "select" | "slice" | "narrow" | "expand" | "expand_as" | "broadcast_to" | "chunk"
        | "split" | "split_with_sizes" | "tensor_split" | "unbind" | "unfold" | "diagonal"
        | "as_strided" | "alias" | "detach" | "lift_fresh" => Storage::View,
        "reshape" | "reshape_as" | "flatten" | "ravel" => Storage::Reshaped,
        "contiguous" | "to" | "_to_copy" | "type_as" | "float" => Storage::Converted,
        _ => return None,
    })
}

impl AutocastRule {
    pub(crate) fn of(name: &str) -> Self {
        match name {
            "conv1d"
            | "conv2d"
            | "conv3d"
            | "conv_transpose1d"
            | "conv_transpose2d"
            | "conv_transpose3d"
            | "convolution"
            | "_convolution"
            | "linear"
            | "addmm"
            | "mm"
            | "bmm"
            | "matmul"
            | "baddbmm"
            | "einsum"
            | "prelu"
            | "scaled_dot_product_attention"
            | "lstm"
            | "gru"
            | "rnn_tanh"
            | "rnn_relu" => Self::Half,
            "exp"
            | "expm1"
            | "log"
            | "log10"
            | "log2"
            | "log1p"
            | "reciprocal"
            | "rsqrt"
            | "tan"
            | "pow"
            | "softplus"
            | "layer_norm"
            | "native_layer_norm"
            | "group_norm"
            | "logsumexp"
            | "upsample_nearest1d"
            | "upsample_nearest2d"
            | "upsample_nearest3d"
            | "upsample_linear1d"
            | "upsample_bilinear2d"
            | "upsample_bicubic2d"
            | "upsample_trilinear3d"
            | "_upsample_bilinear2d_aa"
            | "_upsample_bicubic2d_aa" => Self::Single,
            "prod" | "cumprod" | "cumsum" | "sum" | "softmax" | "log_softmax" | "norm"
            | "linalg_vector_norm" => Self::SingleResult,
            "batch_norm" | "native_batch_norm" | "instance_norm" => Self::First,
            _ => Self::Widest,
        }
    }
}
