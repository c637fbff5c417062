//! The machines for which a plan can be made.
//!
//! GPUs and vCPUs per instance: Amazon's pages on the instance families (aws.amazon.com/ec2/instance-types/ with p4,
//! p3, g5, g6, g4, p5), as in the catalogue named in [`crate::price`].

use crate::{
    Error,
    gpu::{self, Gpu},
    price::{self, Prices},
};

/// Connection between the GPUs of a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interconnect {
    /// Its name.
    pub name: &'static str,
    /// Peak bytes per second out of one GPU.
    pub bandwidth: f64,
    /// Share of the bandwidth that an all-reduce reaches: an estimate, not measured.
    pub efficiency: f64,
}

impl Interconnect {
    /// Bytes per second out of one GPU that an all-reduce reaches.
    #[must_use]
    pub fn effective_bandwidth(&self) -> f64 {
        self.bandwidth * self.efficiency
    }
}

/// A100's data sheet: 600 GB/s in both directions together.
const NVSWITCH: Interconnect = Interconnect { name: "NVSwitch", bandwidth: 300e9, efficiency: 0.7 };
/// V100's data sheet: 300 GB/s in both directions together, over six links; with four GPUs, some links are idle.
const NVLINK: Interconnect = Interconnect { name: "NVLink", bandwidth: 150e9, efficiency: 0.5 };
/// PCI Express 4.0 specification: 16 GT/s over 16 lanes. Data goes through the host's memory, because these GPUs
/// cannot access each other's.
const PCIE: Interconnect =
    Interconnect { name: "PCIe 4.0 x16", bandwidth: 31.5e9, efficiency: 0.4 };

/// A machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Name for `--on`.
    pub name: &'static str,
    /// The rented instance type, or the share of one.
    pub instance: &'static str,
    /// Its GPU type.
    pub gpu: Gpu,
    /// Number of GPUs.
    pub gpus: u32,
    /// Number of hardware threads of its CPUs.
    pub vcpus: u32,
    /// Connection between its GPUs, if there are several.
    pub interconnect: Option<Interconnect>,
    /// Prices per hour.
    pub prices: Prices,
}

/// All known machines, in the order in which they are shown.
pub const MACHINES: [Machine; 9] = [
    Machine {
        name: "p4d.24xlarge",
        instance: "p4d.24xlarge",
        gpu: gpu::A100_40,
        gpus: 8,
        vcpus: 96,
        interconnect: Some(NVSWITCH),
        prices: price::P4D_24XLARGE,
    },
    Machine {
        name: "p3.8xlarge",
        instance: "p3.8xlarge",
        gpu: gpu::V100,
        gpus: 4,
        vcpus: 32,
        interconnect: Some(NVLINK),
        prices: price::P3_8XLARGE,
    },
    Machine {
        name: "g5.12xlarge",
        instance: "g5.12xlarge",
        gpu: gpu::A10G,
        gpus: 4,
        vcpus: 48,
        interconnect: Some(PCIE),
        prices: price::G5_12XLARGE,
    },
    Machine {
        name: "g6.12xlarge",
        instance: "g6.12xlarge",
        gpu: gpu::L4,
        gpus: 4,
        vcpus: 48,
        interconnect: Some(PCIE),
        prices: price::G6_12XLARGE,
    },
    single("t4", "g4dn.xlarge", gpu::T4, 4, price::G4DN_XLARGE),
    single("l4", "g6.xlarge", gpu::L4, 4, price::G6_XLARGE),
    // Amazon rents A100 and H200 GPUs only in groups of eight. An eighth is for comparison with a share of such a
    // machine, or with another provider's single GPU.
    single("a100-40", "1/8 of p4d.24xlarge", gpu::A100_40, 12, price::P4D_24XLARGE.share(8)),
    single("h100", "p5.4xlarge", gpu::H100, 16, price::P5_4XLARGE),
    single("h200", "1/8 of p5en.48xlarge", gpu::H200, 24, price::P5EN_48XLARGE.share(8)),
];

const fn single(
    name: &'static str,
    instance: &'static str,
    gpu: Gpu,
    vcpus: u32,
    prices: Prices,
) -> Machine {
    Machine { name, instance, gpu, gpus: 1, vcpus, interconnect: None, prices }
}

impl Machine {
    /// The machine with this name.
    ///
    /// # Errors
    /// No machine has this name.
    pub fn named(name: &str) -> Result<&'static Self, Error> {
        MACHINES.iter().find(|machine| machine.name == name).ok_or_else(|| {
            let known: Vec<&str> = MACHINES.iter().map(|machine| machine.name).collect();
            Error::UnknownMachine { name: name.to_owned(), known: known.join(", ") }
        })
    }
}
