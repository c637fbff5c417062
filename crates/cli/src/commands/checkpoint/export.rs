//! `baton checkpoint export`

use std::path::{Path, PathBuf};

use baton_checkpoint::{
    Float, MANIFEST, Manifest, Store, check_weights_file,
    export::{Weights, safetensors_as},
};
use baton_job::exit::Failure;
use baton_language::{
    NewFolder,
    model::CONFIG,
    peft::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config},
};

use super::{
    folder::{FolderFlags, is_newest, store_failure, with_picked, with_store},
    merge::language_recipe,
};
use crate::{
    commands::{dtype::Dtype, model::language_failure},
    failure::bad_input,
    human, json,
    output::refuse_special_file,
};

/// Write a checkpoint's weights as safetensors, with torchvision's names and shapes, or as an adapter for PEFT
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint export --out resnet50.safetensors                               the newest checkpoint
  baton checkpoint export step-0000000440-gen-000003 --out resnet50.safetensors
  baton checkpoint export --ema --out resnet50.safetensors                         averaged weights
  baton checkpoint export --dtype f16 --out resnet50.safetensors                   half the size
  baton checkpoint export --peft adapter                                           an adapter of a language model

--peft writes adapter_model.safetensors and adapter_config.json, which PEFT's PeftModel.from_pretrained reads; \
`baton checkpoint merge` writes the whole model instead.

With --dtype f16 or bf16 every floating-point tensor is rounded to the nearest value, ties to even: the \
weights, the biases, and BatchNorm's running statistics too, as in PyTorch's model.half(). \
num_batches_tracked and a program's integers keep their type. A value out of the range of f16 is an error that names it; bf16 has nearly \
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
    #[arg(long, value_name = "FILE", required_unless_present = "peft")]
    out: Option<PathBuf>,
    /// The folder to write an adapter to; it must not exist, or be empty
    #[arg(long, value_name = "FOLDER", conflicts_with = "out")]
    peft: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Refuses to write into the folder of a checkpoint, which could replace one of its files.
fn refuse_file_of_checkpoint(out: &Path) -> Result<(), Failure> {
    let folder = out.parent().filter(|folder| folder.join(MANIFEST).exists());
    folder.map_or(Ok(()), |folder| {
        let (out, folder) = (out.display(), folder.display());
        Err(bad_input(format!("{out}: {folder} is a checkpoint: give a path outside of it")))
    })
}

/// Refuses to replace a file that is in use as something else: weights of a model, or a file that has none.
fn refuse_other_file(out: &Path) -> Result<(), Failure> {
    if !out.exists() {
        return Ok(());
    }
    let folder = out.parent().unwrap_or(Path::new(""));
    // One file, or several: model-00001-of-00002.safetensors.
    let is_model = out.file_name().is_some_and(|name| name.to_string_lossy().starts_with("model"));
    if is_model && folder.join(CONFIG).exists() {
        let (out, folder) = (out.display(), folder.display());
        return Err(bad_input(format!(
            "{out} has weights of the model in {folder}: give another path"
        )));
    }
    check_weights_file(out).map_err(|_| {
        bad_input(format!(
            "{} exists and is not a file of weights: remove it, or give another path",
            out.display()
        ))
    })
}

/// What to write.
#[derive(Clone, Debug)]
enum ExportTarget {
    /// A file.
    File(PathBuf),
    /// A folder with an adapter.
    Peft(PathBuf),
}

impl ExportTarget {
    fn path(&self) -> &Path {
        match self {
            Self::File(path) | Self::Peft(path) => path,
        }
    }

    fn format(&self) -> &'static str {
        match self {
            Self::File(_) => "safetensors",
            Self::Peft(_) => "peft",
        }
    }

    /// Writes the weights and returns the size of the files.
    fn write(
        &self,
        float: Float,
        store: &Store,
        manifest: &Manifest,
        weights: Weights,
    ) -> Result<u64, Failure> {
        match self {
            Self::File(out) => {
                safetensors_as(float, store, manifest, weights, out).map_err(store_failure)?;
                Ok(size(out))
            }
            Self::Peft(target) => {
                let of = |problem| bad_input(format!("checkpoint {} {problem}", manifest.name()));
                let spec = language_recipe(manifest)?;
                let tensors: Vec<&str> =
                    manifest.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
                let config = adapter_config(&spec, &tensors).map_err(of)?;
                let folder = NewFolder::create(target).map_err(language_failure)?;
                let out = folder.path().join(ADAPTER_WEIGHTS);
                safetensors_as(float, store, manifest, weights, &out).map_err(store_failure)?;
                let written = folder.write(ADAPTER_CONFIG, config.as_bytes());
                let bytes = size(&out) + config.len() as u64;
                written.and_then(|()| folder.finish()).map_err(language_failure)?;
                Ok(bytes)
            }
        }
    }
}

fn size(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// The target of the flags, of which clap requires one.
fn target(args: &Args) -> Result<ExportTarget, Failure> {
    match (&args.out, &args.peft) {
        (Some(out), _) => {
            refuse_special_file(out)?;
            refuse_file_of_checkpoint(out)?;
            refuse_other_file(out)?;
            Ok(ExportTarget::File(out.clone()))
        }
        (None, Some(folder)) => Ok(ExportTarget::Peft(folder.clone())),
        (None, None) => Err(bad_input("give --out FILE or --peft FOLDER")),
    }
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let target = target(&args)?;
    let folder = args.folder.find().await?;
    let float = args.dtype.float();
    let weights = if args.ema { Weights::Averaged } else { Weights::Raw };
    let (path, format) = (target.path().display().to_string(), target.format());
    let (manifest, damaged, bytes) = with_store(folder.location.clone(), move |store| {
        let write = |manifest: &Manifest| target.write(float, store, manifest, weights);
        with_picked(store, &folder, args.name.as_deref(), write)
    })
    .await?;
    let exported = json::ExportedWeights {
        checkpoint: manifest.name(),
        path,
        arch: manifest.arch,
        step: manifest.step.0,
        dtype: args.dtype.name(),
        averaged: args.ema,
        bytes,
        format,
    };
    json::print(args.json, &exported, |exported| {
        let json::ExportedWeights { path, arch, step, dtype, format, .. } = exported;
        let cast = if *dtype == "f32" { String::new() } else { format!(" in {dtype}") };
        let what = if *format == "peft" { "adapter" } else { arch };
        format!("wrote {path}: {what} of step {step}{cast} ({})", human::bytes(bytes))
    });
    is_newest(&exported.checkpoint, &damaged, "exported")
}
