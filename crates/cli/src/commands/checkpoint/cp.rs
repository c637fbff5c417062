//! `baton checkpoint cp`

use baton_checkpoint::Store;
use baton_job::exit::Failure;

use super::folder::{
    BareWord, FoundFolder, Reference, Unreadable, blocking, is_newest, open, pick_and_skip,
    store_failure,
};
use crate::{
    commands::bar::{BYTES, bar},
    failure::bad_input,
    human, json,
};

/// Copy a checkpoint to another folder or bucket, and verify it during the copy
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton checkpoint cp runs/digits_cpu/checkpoints /mnt/backup/digits         the newest complete checkpoint
  baton checkpoint cp runs/a/checkpoints/step-0000000440-gen-000003 s3://bucket/a
  baton checkpoint cp s3://bucket/a runs/b/checkpoints

The checkpoint keeps its name, and appears in the destination only once all its files are there. To continue \
an interrupted copy, run the command again. Only one file is in memory at a time.

Do not copy to where a job saves: the destination takes over the checkpoint's generation, and a job there of \
an older generation can no longer save. A job that starts there resumes from the newest checkpoint; \
its recipe must be the same.

A folder does not record which checkpoints a rollback has invalidated: after a divergence, name the one to copy.

Exit code 1 after a copy: newer checkpoints were not copied because they are damaged.")]
pub(crate) struct Args {
    /// A folder or s3://BUCKET/PREFIX, with /NAME for a checkpoint other than the newest complete one
    #[arg(value_name = "SOURCE")]
    source: String,
    /// The folder or s3://BUCKET/PREFIX to copy to; created if it does not exist
    #[arg(value_name = "DESTINATION")]
    destination: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn run(args: Args) -> Result<(), Failure> {
    let (source, destination) = (args.source, args.destination);
    let (copied, skipped) = blocking(move || copy(&source, &destination)).await?;
    json::print(args.json, &copied, text);
    is_newest(&copied.name, &skipped, "copied")
}

/// Copies a checkpoint. Also returns the newer ones that are damaged.
fn copy(source: &str, destination: &str) -> Result<(json::CopiedCheckpoint, Vec<String>), Failure> {
    let Reference { location, name } = Reference::parse(source, BareWord::Location);
    let location = location.ok_or_else(|| {
        bad_input(format!("{source} is only a name: add its folder, as in FOLDER/{source}"))
    })?;
    if let Reference { location: Some(folder), name: Some(_) } =
        Reference::parse(destination, BareWord::Location)
    {
        return Err(bad_input(format!(
            "{destination} names a checkpoint: give the folder of checkpoints to copy to, {folder}"
        )));
    }
    let from = open(&location)?;
    let folder = FoundFolder::at(&location);
    let (manifest, skipped) = pick_and_skip(&from, &folder, name.as_deref(), &Unreadable::new())?;
    let to = Store::open(destination).map_err(store_failure)?;
    let bar = bar(BYTES, manifest.all_bytes());
    let copied = from.copy_to(&manifest, &to, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let copied = copied.map_err(store_failure)?;
    let copied = json::CopiedCheckpoint {
        name: manifest.name(),
        location: destination.to_owned(),
        written_files: copied.written as u64,
        written_bytes: copied.written_bytes,
        kept_files: copied.kept as u64,
        was_there: copied.was_there,
    };
    Ok((copied, skipped))
}

fn text(copied: &json::CopiedCheckpoint) -> String {
    let json::CopiedCheckpoint { name, location, written_files, written_bytes, .. } = copied;
    if copied.was_there {
        return format!("{name} is already in {location}");
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
    fn a_copy_shows_written_and_existing_files() {
        let (from, to) = (samples::store(), tempfile::tempdir().unwrap());
        let manifest = Sample::default().save(&from.store);
        let destination = to.path().join("new").display().to_string();
        let source = from.location();
        let mut shown = Vec::new();
        let mut copy = || {
            let (copied, skipped) = copy(&source, &destination).unwrap();
            assert_eq!(skipped, [""; 0]);
            shown.push(text(&copied).replace(&destination, "[destination]"));
            shown.push(json::line(&copied).replace(&destination, "[destination]"));
        };
        copy();
        copy();
        // As if the first copy had been interrupted before the last file.
        let copied_dir = std::path::Path::new(&destination).join(manifest.name());
        std::fs::remove_file(copied_dir.join("manifest.json")).unwrap();
        std::fs::remove_file(copied_dir.join(&manifest.shards[1].file)).unwrap();
        copy();
        assert_snapshot!(shown.join("\n"));
    }

    #[test]
    fn a_destination_that_is_a_checkpoint_is_rejected_with_its_folder() {
        let from = samples::store();
        let name = Sample::default().save(&from.store).name();
        let error = copy(&from.location(), &format!("/nowhere/{name}")).unwrap_err().message;
        assert!(error.ends_with("the folder of checkpoints to copy to, /nowhere"), "{error}");
    }

    #[test]
    fn a_bare_name_and_an_unknown_name_are_rejected_with_a_remedy() {
        let from = samples::store();
        let name = Sample::default().save(&from.store).name();
        let rejected = |source: &str| copy(source, "/nowhere").unwrap_err().message;
        assert!(rejected(&name).contains(&format!("FOLDER/{name}")));
        let typed = name.replace("gen-000002", "gen-000003");
        let error = rejected(&format!("{}/{typed}", from.location()));
        assert!(error.contains(&format!("did you mean {name}?")), "{error}");
    }
}
