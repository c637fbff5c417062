//! `baton checkpoint cp`

use baton_checkpoint::Store;
use baton_job::exit::Failure;

use super::{
    bar::bar,
    folder::{Bare, Reference, about, blocking, open, pick},
};
use crate::{failure::bad_input, human, json, output};

/// Copy a checkpoint to another folder or bucket, verified on the way
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint cp runs/digits_cpu/checkpoints /mnt/backup/digits         the newest whole one
  baton checkpoint cp runs/a/checkpoints/step-0000000440-gen-000003 s3://bucket/a
  baton checkpoint cp s3://bucket/a runs/b/checkpoints

The checkpoint keeps its name, and becomes one in the destination only once all its files are there. A \
copy that was cut off goes on where it stopped: run it again. One file is in memory at a time.

Copy to where no job saves: the destination takes over the checkpoint's generation, and a job there of \
an older generation cannot save any more. A job that starts there goes on from the newest checkpoint; \
its recipe must be the same.")]
pub(crate) struct Args {
    /// A folder or s3://BUCKET/PREFIX, with /NAME for another than the newest whole checkpoint
    #[arg(value_name = "SOURCE")]
    source: String,
    /// The folder or s3://BUCKET/PREFIX to copy to; made if it is not there
    #[arg(value_name = "DESTINATION")]
    destination: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let (source, destination) = (args.source, args.destination);
    let copied = blocking(move || copy(&source, &destination)).await?;
    output::line(if args.json { json::line(&copied) } else { text(&copied) });
    Ok(())
}

fn copy(source: &str, destination: &str) -> Result<json::CopiedCheckpoint, Failure> {
    let Reference { location, name } = Reference::parse(source, Bare::Location);
    let location = location.ok_or_else(|| {
        bad_input(format!("{source} is a name: say where it lies, as in FOLDER/{source}"))
    })?;
    let from = open(&location)?;
    let manifest = pick(&from, name.as_deref())?;
    let to = Store::open(destination).map_err(about)?;
    let bar = bar(manifest.all_bytes());
    let copied = from.copy_to(&manifest, &to, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let copied = copied.map_err(about)?;
    Ok(json::CopiedCheckpoint {
        name: manifest.name(),
        location: destination.to_owned(),
        written_files: copied.written as u64,
        written_bytes: copied.written_bytes,
        kept_files: copied.kept as u64,
        was_there: copied.was_there,
    })
}

fn text(copied: &json::CopiedCheckpoint) -> String {
    let json::CopiedCheckpoint { name, location, written_files, written_bytes, .. } = copied;
    if copied.was_there {
        return format!("{name} is in {location} already");
    }
    let kept = match copied.kept_files {
        0 => String::new(),
        kept => format!("; {} of an earlier copy kept", human::count(kept, "file")),
    };
    let (bytes, files) = (human::bytes(*written_bytes), human::count(*written_files, "file"));
    format!("copied {name} to {location}: {bytes} in {files}{kept}")
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::commands::checkpoint::samples::{self, Sample};

    #[test]
    fn a_copy_tells_what_was_written_and_what_was_there() {
        let (from, to) = (samples::store(), tempfile::tempdir().unwrap());
        let manifest = Sample::default().save(&from.store);
        let destination = to.path().join("new").display().to_string();
        let source = from.location();
        let mut told = Vec::new();
        let mut copy = || {
            let copied = copy(&source, &destination).unwrap();
            told.push(text(&copied).replace(&destination, "[destination]"));
            told.push(json::line(&copied).replace(&destination, "[destination]"));
        };
        copy();
        copy();
        // As if the first copy had been cut off before the last file.
        let there = std::path::Path::new(&destination).join(manifest.name());
        std::fs::remove_file(there.join("manifest.json")).unwrap();
        std::fs::remove_file(there.join(&manifest.shards[1].file)).unwrap();
        copy();
        assert_snapshot!(told.join("\n"));
    }

    #[test]
    fn a_bare_name_and_an_unknown_one_are_refused_with_what_to_do() {
        let from = samples::store();
        let name = Sample::default().save(&from.store).name();
        let refused = |source: &str| copy(source, "/nowhere").unwrap_err().message;
        assert!(refused(&name).contains(&format!("FOLDER/{name}")));
        let typed = name.replace("gen-000002", "gen-000003");
        let refused = refused(&format!("{}/{typed}", from.location()));
        assert!(refused.contains(&format!("is {name} meant?")), "{refused}");
    }
}
