//! `baton checkpoint verify`

use baton_job::exit::Failure;
use indicatif::{ProgressBar, ProgressStyle};

use super::folder::{Folder, none_whole, pick, with_store};
use crate::{human, output};

/// Read a checkpoint whole and compare every file with its digest
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint verify                               the newest
  baton checkpoint verify step-0000000440-gen-000003")]
pub(crate) struct Args {
    #[command(flatten)]
    folder: Folder,
    /// Which one [default: the newest whole one]
    name: Option<String>,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let location = args.folder.find().await?;
    let bar = bar();
    let in_progress = bar.clone();
    let verified = with_store(location.clone(), move |store| {
        let Some(manifest) = pick(store, args.name.as_deref())? else { return Ok(None) };
        let mut progress = |done, total| {
            in_progress.set_length(total);
            in_progress.set_position(done);
        };
        store.verify(&manifest, &mut progress)?;
        Ok(Some(manifest))
    })
    .await;
    bar.finish_and_clear();
    let manifest = verified?.ok_or_else(|| none_whole(&location))?;
    output::line(format_args!(
        "{} is whole: {} in {} match their digests",
        manifest.name(),
        human::bytes(manifest.bytes()),
        human::count(manifest.shards.len() as u64, "file")
    ));
    Ok(())
}

/// Draws on standard error, and only on a terminal.
fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes}  {eta} left");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
