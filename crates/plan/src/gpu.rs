//! Speed and memory of GPUs, from NVIDIA's data sheets.
//!
//! | GPU | data sheet |
//! |---|---|
//! | T4 | NVIDIA T4 Tensor Core GPU, data sheet, 2019; fp16 with tensor cores 65 TFLOPS |
//! | V100 | NVIDIA V100 Tensor Core GPU, data sheet, 2020, column SXM2 |
//! | A10G | NVIDIA A10G (Amazon EC2 G5), data sheet: the A10's chip and memory, fewer tensor cores |
//! | L4 | NVIDIA L4 Tensor Core GPU, data sheet, 2023; half of the figures "with sparsity" |
//! | A100 | NVIDIA A100 Tensor Core GPU, data sheet, 2021, column 40 GB SXM |
//! | H100 | NVIDIA H100 Tensor Core GPU, data sheet, 2023, column SXM; half of the figures "with sparsity" |
//! | H200 | NVIDIA H200 Tensor Core GPU, data sheet, 2024, column SXM; half of the figures "with sparsity" |
//!
//! Memory is what Amazon's `DescribeInstanceTypes` gives as `GpuInfo.Gpus.MemoryInfo.SizeInMiB`. For the T4 it
//! is what `nvidia-smi` shows, a sixteenth less, because error correction uses part of the memory. Data sheets
//! give peaks for dense matrices; [`crate::roofline`] has the share of them that is reached in practice.

use baton_recipe::spec::Compute;

/// 2²⁰ bytes.
const MIB: u64 = 1 << 20;

/// A GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// Name, with the memory in GB if the GPU exists in several sizes.
    pub name: &'static str,
    /// Size of its memory, bytes.
    pub memory_bytes: u64,
    /// Peak memory bandwidth, bytes per second.
    pub bandwidth: f64,
    /// Peak floating-point operations per second in fp32, without tensor cores.
    pub fp32: f64,
    /// Peak floating-point operations per second in TF32, which libtorch uses for fp32 convolutions if the GPU supports
    /// it.
    pub tf32: Option<f64>,
    /// Peak floating-point operations per second in fp16 with tensor cores.
    pub fp16: f64,
    /// Peak floating-point operations per second in bf16 with tensor cores, if the GPU supports it.
    pub bf16: Option<f64>,
}

/// Speed of matrix products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arithmetic {
    /// Peak floating-point operations per second.
    pub peak: f64,
    /// Whether tensor cores compute them.
    pub tensor_cores: bool,
    /// Name of the number format.
    pub format: &'static str,
}

impl Gpu {
    /// Speed of convolutions in a recipe's number format.
    #[must_use]
    pub fn arithmetic(&self, compute: Compute) -> Arithmetic {
        let plain = |format| Arithmetic { peak: self.fp32, tensor_cores: false, format };
        let tensor = |peak, format| Arithmetic { peak, tensor_cores: true, format };
        match compute {
            Compute::Fp32 => self.tf32.map_or(plain("fp32"), |peak| tensor(peak, "tf32")),
            Compute::Fp16 => tensor(self.fp16, "fp16"),
            Compute::Bf16 => self.bf16.map_or(plain("emulated bf16"), |peak| tensor(peak, "bf16")),
        }
    }
}

/// Turing, 2018.
pub const T4: Gpu = Gpu {
    name: "T4",
    memory_bytes: 15_360 * MIB,
    bandwidth: 320e9,
    fp32: 8.1e12,
    tf32: None,
    fp16: 65e12,
    bf16: None,
};

/// Volta, 2017.
pub const V100: Gpu = Gpu {
    name: "V100-16",
    memory_bytes: 16_384 * MIB,
    bandwidth: 900e9,
    fp32: 15.7e12,
    tf32: None,
    fp16: 125e12,
    bf16: None,
};

/// Ampere, 2021, made for Amazon.
pub const A10G: Gpu = Gpu {
    name: "A10G",
    memory_bytes: 22_888 * MIB,
    bandwidth: 600e9,
    fp32: 31.5e12,
    tf32: Some(35e12),
    fp16: 70e12,
    bf16: Some(70e12),
};

/// Ada, 2023.
pub const L4: Gpu = Gpu {
    name: "L4",
    memory_bytes: 22_888 * MIB,
    bandwidth: 300e9,
    fp32: 30.3e12,
    tf32: Some(60e12),
    fp16: 121e12,
    bf16: Some(121e12),
};

/// Ampere, 2020.
pub const A100_40: Gpu = Gpu {
    name: "A100-40",
    memory_bytes: 40_960 * MIB,
    bandwidth: 1_555e9,
    fp32: 19.5e12,
    tf32: Some(156e12),
    fp16: 312e12,
    bf16: Some(312e12),
};

/// Hopper, 2022.
pub const H100: Gpu = Gpu {
    name: "H100-80",
    memory_bytes: 81_920 * MIB,
    bandwidth: 3_350e9,
    fp32: 67e12,
    tf32: Some(494.5e12),
    fp16: 989.5e12,
    bf16: Some(989.5e12),
};

/// Hopper with more and faster memory, 2024.
pub const H200: Gpu = Gpu {
    name: "H200-141",
    memory_bytes: 144_384 * MIB,
    bandwidth: 4_800e9,
    fp32: 67e12,
    tf32: Some(494.5e12),
    fp16: 989.5e12,
    bf16: Some(989.5e12),
};
