//! `baton checkpoint export`

use std::path::{Path, PathBuf};

use baton_checkpoint::{
    MANIFEST,
    export::{Float, Weights, safetensors_as},
};
use baton_job::exit::Failure;
use clap::ValueEnum;

use super::folder::{FolderFlags, is_newest, pick_and_skip, store_failure, with_store};
use crate::{failure::bad_input, human, json, output::refuse_special_file};

/// Write a checkpoint's weights as safetensors, with torchvision's names and shapes
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint export --out resnet50.safetensors                               the newest checkpoint
  baton checkpoint export step-0000000440-gen-000003 --out resnet50.safetensors
  baton checkpoint export --ema --out resnet50.safetensors                         averaged weights
  baton checkpoint export --dtype f16 --out resnet50.safetensors                   half the size

With --dtype f16 or bf16 every floating-point tensor is rounded to the nearest value, ties to even: the \
weights, the biases, and BatchNorm's running statistics too, as in PyTorch's model.half(). \
num_batches_tracked stays int64. A value out of the range of f16 is an error that names it; bf16 has nearly \
the range of f32. `baton-worker eval` and fine-tuning read only f32.

Exit code 1 after an export: newer checkpoints were not exported because they are damaged.")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: FolderFlags,
    /// Name of the checkpoint [default: the newest complete one]
    name: Option<String>,
    /// Export the moving average of the weights instead of the weights
    #[arg(long)]
    ema: bool,
    /// The type of floating-point values
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    fn float(self) -> Float {
        match self {
            Self::F32 => Float::F32,
            Self::F16 => Float::F16,
            Self::Bf16 => Float::Bf16,
        }
    }
}

/// Refuses to write into the folder of a checkpoint, which could replace one of its files.
fn refuse_file_of_checkpoint(out: &Path) -> Result<(), Failure> {
    let folder = out.parent().filter(|folder| folder.join(MANIFEST).exists());
    folder.map_or(Ok(()), |folder| {
        let (out, folder) = (out.display(), folder.display());
        Err(bad_input(format!("{out}: {folder} is a checkpoint: give a path outside of it")))
    })
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    refuse_special_file(&args.out)?;
    refuse_file_of_checkpoint(&args.out)?;
    let location = args.folder.find().await?;
    let (out, float) = (args.out.clone(), args.dtype.float());
    let weights = if args.ema { Weights::Averaged } else { Weights::Raw };
    let (manifest, damaged) = with_store(location, move |store| {
        let (manifest, damaged) = pick_and_skip(store, args.name.as_deref())?;
        safetensors_as(float, store, &manifest, weights, &out).map_err(store_failure)?;
        Ok((manifest, damaged))
    })
    .await?;
    let bytes = std::fs::metadata(&args.out).map_or(0, |metadata| metadata.len());
    let dtype = args.dtype.to_possible_value().map(|value| value.get_name().to_owned());
    let exported = json::ExportedWeights {
        checkpoint: manifest.name(),
        path: args.out.display().to_string(),
        arch: manifest.arch,
        step: manifest.step.0,
        dtype: dtype.unwrap_or_default(),
        averaged: args.ema,
        bytes,
    };
    json::print(args.json, &exported, |exported| {
        let json::ExportedWeights { path, arch, step, dtype, .. } = exported;
        let cast = if dtype == "f32" { String::new() } else { format!(" in {dtype}") };
        format!("wrote {path}: {arch} of step {step}{cast} ({})", human::bytes(bytes))
    });
    is_newest(&exported.checkpoint, &damaged, "exported")
}
