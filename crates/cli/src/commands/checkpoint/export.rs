//! `baton checkpoint export`

use std::path::PathBuf;

use baton_checkpoint::export::{Weights, safetensors};
use baton_job::exit::Failure;

use super::folder::{Folder, none_whole, pick, with_store};
use crate::{human, output};

/// Write a checkpoint's weights as safetensors, with torchvision's names and shapes
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint export --out resnet50.safetensors                               the newest
  baton checkpoint export step-0000000440-gen-000003 --out resnet50.safetensors
  baton checkpoint export --ema --out resnet50.safetensors                         averaged weights")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Which one [default: the newest whole one]
    name: Option<String>,
    /// The moving average of the weights instead of the weights
    #[arg(long)]
    ema: bool,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let location = args.folder.find().await?;
    let out = args.out.clone();
    let weights = if args.ema { Weights::Averaged } else { Weights::Raw };
    let exported = with_store(location.clone(), move |store| {
        let Some(manifest) = pick(store, args.name.as_deref())? else { return Ok(None) };
        safetensors(store, &manifest, weights, &out)?;
        Ok(Some(manifest))
    })
    .await?;
    let manifest = exported.ok_or_else(|| none_whole(&location))?;
    let bytes = std::fs::metadata(&args.out).map_or(0, |metadata| metadata.len());
    output::line(format_args!(
        "wrote {}: {} of step {} ({})",
        args.out.display(),
        manifest.arch,
        manifest.step,
        human::bytes(bytes)
    ));
    Ok(())
}
