//! The recipe as the machines need it: data where they find it, checkpoints where they outlive them. Pure.

use std::path::{Path, PathBuf};

use baton_recipe::JobSpec;

use crate::stack::Job;

/// Where the job's volume is mounted.
const VOLUME: &str = "/data";
/// The machine's own disks.
const CACHE: &str = "/var/lib/baton/cache";
/// Where the staged files are on a machine.
const PROGRAMS: &str = "/opt/baton";
/// The staged weights to begin with.
pub(super) const PRETRAINED: &str = "pretrained.safetensors";

/// A recipe for machines, and what has to be brought to the bucket for it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Moved {
    pub(super) spec: JobSpec,
    /// Files of this machine, each with its place in the bucket.
    pub(super) uploads: Vec<(PathBuf, String)>,
    /// Weights to begin with, of this machine.
    pub(super) pretrained: Option<PathBuf>,
    /// Another bucket, which the machines must be allowed to read.
    pub(super) data_bucket: Option<String>,
}

/// Makes a recipe fit for machines.
///
/// # Errors
/// One line: which value cannot be reached from there, and what to do.
pub(super) fn moved(
    mut spec: JobSpec,
    job: &Job,
    bucket: &str,
    has_volume: bool,
    exists: impl Fn(&Path) -> bool,
) -> Result<Moved, String> {
    let own = format!("s3://{bucket}/{}", job.name());
    let (mut uploads, mut data_bucket) = (Vec::new(), None);
    for (key, place) in [("data.train", &mut spec.data.train), ("data.val", &mut spec.data.val)] {
        if let Some(url) = place.strip_prefix("s3://") {
            let other = url.split('/').next().unwrap_or_default();
            // Of the bucket of the job, machines may read the job's own folder only.
            let is_new = !is_below(place, &own) && data_bucket.as_deref() != Some(other);
            if is_new && data_bucket.replace(other.to_owned()).is_some() {
                return Err(format!(
                    "{key} = {place:?}: the data lies in two buckets besides {bucket}; machines may read one"
                ));
            }
        } else if is_below(place, VOLUME) && has_volume {
            // There when the volume is mounted.
        } else if exists(Path::new(place.as_str())) {
            let file = Path::new(place.as_str())
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            // Both may have the same name.
            let kind = key.trim_start_matches("data.");
            let url = format!("{own}/data/{kind}/{file}");
            uploads.push((PathBuf::from(place.as_str()), url.clone()));
            *place = url;
        } else if is_below(place, VOLUME) {
            return Err(format!(
                "{key} = {place:?} is on a volume that the job does not have: --volume-gb makes one, --snapshot one with data, \
                 or --set {key}=s3://… names a bucket"
            ));
        } else {
            return Err(format!(
                "{key} = {place:?} is no file of this machine and no bucket: bring the data to one (`aws s3 cp`) and use --set {key}=s3://…"
            ));
        }
    }
    let is_remote =
        [&spec.data.train, &spec.data.val].iter().any(|place| place.starts_with("s3://"));
    if is_remote && spec.data.cache_dir.is_empty() {
        spec.data.cache_dir = CACHE.to_owned();
    }

    let dir = &mut spec.checkpoint.dir;
    let lasting = format!("{own}/checkpoints");
    let on_volume = has_volume && is_below(dir, &format!("{VOLUME}/checkpoints"));
    if dir.is_empty() || (!dir.contains("://") && !dir.starts_with('/')) {
        *dir = lasting;
    } else if !is_below(dir, &lasting) && !on_volume {
        return Err(format!(
            "checkpoint.dir = {dir:?}: machines may write below {lasting} (the default){}",
            if has_volume {
                " and /data/checkpoints"
            } else {
                "; with --volume-gb also below /data/checkpoints"
            }
        ));
    }

    let mut pretrained = None;
    if !spec.model.pretrained.is_empty() && !is_below(&spec.model.pretrained, VOLUME) {
        let file = PathBuf::from(&spec.model.pretrained);
        if !exists(&file) {
            return Err(format!(
                "model.pretrained = {:?} is no file of this machine",
                spec.model.pretrained
            ));
        }
        pretrained = Some(file);
        spec.model.pretrained = format!("{PROGRAMS}/{PRETRAINED}");
    }
    Ok(Moved { spec, uploads, pretrained, data_bucket })
}

fn is_below(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: [&str; 2] = ["assets/train.beton", "assets/val.beton"];

    fn moved_with(overrides: &[&str], has_volume: bool) -> Result<Moved, String> {
        let text = include_str!("../../../recipes/digits_cpu.toml");
        let mut all = vec![
            "data.train=assets/train.beton".to_owned(),
            "data.val=assets/val.beton".to_owned(),
        ];
        all.extend(overrides.iter().map(ToString::to_string));
        let spec = JobSpec::from_toml(text, &all).unwrap();
        let here = |path: &Path| HERE.iter().any(|known| Path::new(known) == path);
        moved(spec, &"digits".parse().unwrap(), "bucket", has_volume, here)
    }

    #[test]
    fn files_of_this_machine_go_to_the_bucket_and_are_cached_there() {
        let moved = moved_with(&[], false).unwrap();
        assert_eq!(moved.spec.data.train, "s3://bucket/digits/data/train/train.beton");
        assert_eq!(
            moved.uploads[1],
            (PathBuf::from(HERE[1]), "s3://bucket/digits/data/val/val.beton".to_owned())
        );
        assert_eq!(moved.spec.data.cache_dir, CACHE);
        assert_eq!(moved.spec.checkpoint.dir, "s3://bucket/digits/checkpoints");
        assert_eq!(moved.data_bucket, None);
    }

    #[test]
    fn data_in_another_bucket_is_read_there() {
        let moved = moved_with(
            &["data.train=s3://imagenet/train-*.beton", "data.val=s3://imagenet/val.beton"],
            false,
        )
        .unwrap();
        assert_eq!((moved.uploads.len(), moved.data_bucket.as_deref()), (0, Some("imagenet")));
        let first = ["data.train=s3://bucket/first/data/a.beton", "data.val=s3://bucket/digits/b"];
        let moved = moved_with(&first, false).unwrap();
        assert_eq!(moved.data_bucket.as_deref(), Some("bucket"), "another job's folder");
        let error =
            moved_with(&["data.train=s3://one/a.beton", "data.val=s3://two/b.beton"], false)
                .unwrap_err();
        assert!(error.contains("two buckets"), "{error}");
    }

    #[test]
    fn a_volume_serves_data_and_checkpoints_where_there_is_one() {
        let on_volume = [
            "data.train=/data/train.beton",
            "data.val=/data/val.beton",
            "checkpoint.dir=/data/checkpoints/a",
        ];
        let moved = moved_with(&on_volume, true).unwrap();
        assert_eq!(
            (moved.spec.data.train.as_str(), moved.spec.checkpoint.dir.as_str()),
            ("/data/train.beton", "/data/checkpoints/a")
        );
        assert_eq!(moved.spec.data.cache_dir, "");
        let error = moved_with(&on_volume, false).unwrap_err();
        assert!(error.contains("--volume-gb"), "{error}");
    }

    #[test]
    fn places_that_machines_cannot_reach_are_refused_with_a_remedy() {
        for (entry, told) in [
            ("data.val=/home/me/val.beton", "--set data.val=s3://"),
            (
                "checkpoint.dir=s3://elsewhere/x",
                "machines may write below s3://bucket/digits/checkpoints",
            ),
            ("checkpoint.dir=/mnt/x", "--volume-gb"),
            ("model.pretrained=weights.safetensors", "no file of this machine"),
        ] {
            let error = moved_with(&[entry], false).unwrap_err();
            assert!(error.contains(told), "{entry}: {error}");
        }
    }
}
