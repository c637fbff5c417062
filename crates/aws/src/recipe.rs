//! Adapts a recipe to AWS machines: data where the machines can read it, checkpoints where they outlive the machines.
//! Pure functions.

use std::path::{Path, PathBuf};

use baton_recipe::JobSpec;

use crate::stack::Job;

/// Mount point of the job's volume.
const VOLUME_DIR: &str = "/data";
/// Data cache on the machine's local disks.
const CACHE_DIR: &str = "/var/lib/baton/cache";
/// Folder of the staged files on a machine.
const STAGED_DIR: &str = "/opt/baton";
/// Name of the staged file with pretrained weights.
const PRETRAINED: &str = "pretrained.safetensors";
/// Name of the staged file with the network of `model.arch = "program"`.
const STAGED_PROGRAM: &str = "program.pt2";

/// A recipe for AWS machines, and the files that have to be uploaded for it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RemoteRecipe {
    pub(super) spec: JobSpec,
    /// Local files, each with its URL in the bucket.
    pub(super) uploads: Vec<(PathBuf, String)>,
    /// Local files that every machine gets, each with its name below `/opt/baton`.
    pub(super) staged: Vec<(PathBuf, &'static str)>,
    /// Another bucket that the machines must be allowed to read.
    pub(super) data_bucket: Option<String>,
}

/// Adapts a recipe to AWS machines.
///
/// # Errors
/// One line: which path the machines cannot reach, and what to do.
pub(super) fn adapt(
    mut spec: JobSpec,
    job: &Job,
    bucket: &str,
    has_volume: bool,
    exists: impl Fn(&Path) -> bool,
) -> Result<RemoteRecipe, String> {
    let job_url = format!("s3://{bucket}/{}", job.name());
    let (mut uploads, mut data_bucket) = (Vec::new(), None);
    for (key, location) in [("data.train", &mut spec.data.train), ("data.val", &mut spec.data.val)]
    {
        if let Some(url) = location.strip_prefix("s3://") {
            let other = url.split('/').next().unwrap_or_default();
            // In the job's bucket, machines may read only the job's own folder.
            let is_new = !is_below(location, &job_url) && data_bucket.as_deref() != Some(other);
            if is_new && data_bucket.replace(other.to_owned()).is_some() {
                return Err(format!(
                    "{key} = {location:?}: the data is in two buckets other than {bucket}; machines may read only one"
                ));
            }
        } else if is_below(location, VOLUME_DIR) && has_volume {
            // The file is there once the volume is mounted.
        } else if exists(Path::new(location.as_str())) {
            let file = Path::new(location.as_str())
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            // Both files may have the same name.
            let folder = key.trim_start_matches("data.");
            let url = format!("{job_url}/data/{folder}/{file}");
            uploads.push((PathBuf::from(location.as_str()), url.clone()));
            *location = url;
        } else if is_below(location, VOLUME_DIR) {
            return Err(format!(
                "{}, or --set {key}=s3://… names a bucket",
                without_volume(key, location)
            ));
        } else {
            return Err(format!(
                "{key} = {location:?} is not a file on this machine and not in a bucket: upload the data (`aws s3 cp`) and use --set {key}=s3://…"
            ));
        }
    }
    let is_remote =
        [&spec.data.train, &spec.data.val].iter().any(|location| location.starts_with("s3://"));
    if is_remote && spec.data.cache_dir.is_empty() {
        spec.data.cache_dir = CACHE_DIR.to_owned();
    }

    let dir = &mut spec.checkpoint.dir;
    let default_dir = format!("{job_url}/checkpoints");
    let on_volume = has_volume && is_below(dir, &format!("{VOLUME_DIR}/checkpoints"));
    if dir.is_empty() || (!dir.contains("://") && !dir.starts_with('/')) {
        *dir = default_dir;
    } else if !is_below(dir, &default_dir) && !on_volume {
        return Err(format!(
            "checkpoint.dir = {dir:?}: machines may write below {default_dir} (the default){}",
            if has_volume {
                " and /data/checkpoints"
            } else {
                "; with --volume-gb also below /data/checkpoints"
            }
        ));
    }

    let mut staged = Vec::new();
    let model = &mut spec.model;
    if !model.path.is_empty() && !is_below(&model.path, VOLUME_DIR) {
        return Err(format!(
            "model.path = {:?}: a model's folder is not copied to the machines: put it on a volume (--volume-gb, --snapshot) \
             and use --set model.path={VOLUME_DIR}/…",
            model.path
        ));
    }
    if !model.path.is_empty() && !has_volume {
        return Err(without_volume("model.path", &model.path));
    }
    for (key, name, path) in [
        ("model.pretrained", PRETRAINED, &mut model.pretrained),
        ("model.program", STAGED_PROGRAM, &mut model.program),
    ] {
        let is_on_volume = is_below(path, VOLUME_DIR);
        if path.is_empty() || (is_on_volume && has_volume) {
            continue;
        }
        let file = PathBuf::from(path.as_str());
        if !exists(&file) {
            return Err(match is_on_volume {
                true => format!(
                    "{}, or --set {key}=FILE names a file on this machine",
                    without_volume(key, path)
                ),
                false => format!("{key} = {path:?} is not a file on this machine"),
            });
        }
        staged.push((file, name));
        *path = format!("{STAGED_DIR}/{name}");
    }
    Ok(RemoteRecipe { spec, uploads, staged, data_bucket })
}

/// The message about a path below `/data` of a job without a volume.
fn without_volume(key: &str, path: &str) -> String {
    format!(
        "{key} = {path:?} is on a volume, but the job has none: --volume-gb makes one, --snapshot makes one with data"
    )
}

fn is_below(path: &str, folder: &str) -> bool {
    path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL_FILES: [&str; 2] = ["assets/train.beton", "assets/val.beton"];

    fn adapt_with(overrides: &[&str], has_volume: bool) -> Result<RemoteRecipe, String> {
        adapt_recipe(include_str!("../../../recipes/digits_cpu.toml"), overrides, has_volume)
    }

    fn adapt_language(overrides: &[&str], has_volume: bool) -> Result<RemoteRecipe, String> {
        adapt_recipe(include_str!("../../../recipes/smollm2_lora_cpu.toml"), overrides, has_volume)
    }

    fn adapt_recipe(
        text: &str,
        overrides: &[&str],
        has_volume: bool,
    ) -> Result<RemoteRecipe, String> {
        let mut all = vec![
            "data.train=assets/train.beton".to_owned(),
            "data.val=assets/val.beton".to_owned(),
        ];
        all.extend(overrides.iter().map(ToString::to_string));
        let spec = JobSpec::from_toml(text, &all).unwrap();
        let exists = |path: &Path| LOCAL_FILES.iter().any(|local| Path::new(local) == path);
        adapt(spec, &"digits".parse().unwrap(), "bucket", has_volume, exists)
    }

    #[test]
    fn local_files_are_uploaded_and_cached_on_the_machines() {
        let remote = adapt_with(&[], false).unwrap();
        assert_eq!(remote.spec.data.train, "s3://bucket/digits/data/train/train.beton");
        assert_eq!(
            remote.uploads[1],
            (PathBuf::from(LOCAL_FILES[1]), "s3://bucket/digits/data/val/val.beton".to_owned())
        );
        assert_eq!(remote.spec.data.cache_dir, CACHE_DIR);
        assert_eq!(remote.spec.checkpoint.dir, "s3://bucket/digits/checkpoints");
        assert_eq!(remote.data_bucket, None);
    }

    #[test]
    fn data_in_another_bucket_is_read_from_there() {
        let remote = adapt_with(
            &["data.train=s3://imagenet/train-*.beton", "data.val=s3://imagenet/val.beton"],
            false,
        )
        .unwrap();
        assert_eq!((remote.uploads.len(), remote.data_bucket.as_deref()), (0, Some("imagenet")));
        let first = ["data.train=s3://bucket/first/data/a.beton", "data.val=s3://bucket/digits/b"];
        let remote = adapt_with(&first, false).unwrap();
        assert_eq!(remote.data_bucket.as_deref(), Some("bucket"), "another job's folder");
        let error =
            adapt_with(&["data.train=s3://one/a.beton", "data.val=s3://two/b.beton"], false)
                .unwrap_err();
        assert!(error.contains("two buckets"), "{error}");
    }

    #[test]
    fn a_volume_can_hold_data_and_checkpoints() {
        let on_volume = [
            "data.train=/data/train.beton",
            "data.val=/data/val.beton",
            "checkpoint.dir=/data/checkpoints/a",
        ];
        let remote = adapt_with(&on_volume, true).unwrap();
        assert_eq!(
            (remote.spec.data.train.as_str(), remote.spec.checkpoint.dir.as_str()),
            ("/data/train.beton", "/data/checkpoints/a")
        );
        assert_eq!(remote.spec.data.cache_dir, "");
        let error = adapt_with(&on_volume, false).unwrap_err();
        assert!(error.contains("--volume-gb"), "{error}");
    }

    #[test]
    fn weights_and_the_program_go_to_every_machine() {
        let model = [
            "model.arch=program",
            "model.program=assets/train.beton",
            "model.zero_init_gamma=false",
            "model.pretrained=assets/val.beton",
        ];
        let remote = adapt_with(&model, false).unwrap();
        let [train, val] = LOCAL_FILES.map(PathBuf::from);
        assert_eq!(remote.staged, [(val, PRETRAINED), (train, STAGED_PROGRAM)]);
        assert_eq!(remote.spec.model.program, "/opt/baton/program.pt2");
        assert_eq!(remote.spec.model.pretrained, "/opt/baton/pretrained.safetensors");
    }

    #[test]
    fn a_language_model_must_be_on_the_volume() {
        for has_volume in [false, true] {
            let error = adapt_language(&["model.path=models/llama"], has_volume).unwrap_err();
            assert!(error.contains("model.path = \"models/llama\""), "{error}");
            assert!(error.contains("--set model.path=/data/"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        let on_volume = ["model.path=/data/llama"];
        let error = adapt_language(&on_volume, false).unwrap_err();
        assert!(error.contains("the job has none: --volume-gb"), "{error}");
        let remote = adapt_language(&on_volume, true).unwrap();
        assert_eq!((remote.spec.model.path.as_str(), remote.staged.len()), ("/data/llama", 0));
    }

    #[test]
    fn weights_and_the_program_on_a_volume_need_one() {
        let model = [
            "model.arch=program",
            "model.program=/data/model.pt2",
            "model.zero_init_gamma=false",
            "model.pretrained=assets/val.beton",
        ];
        let error = adapt_with(&model, false).unwrap_err();
        assert!(error.contains("model.program = \"/data/model.pt2\" is on a volume"), "{error}");
        let remote = adapt_with(&model, true).unwrap();
        assert_eq!(remote.spec.model.program, "/data/model.pt2");
        assert_eq!(remote.staged, [(PathBuf::from(LOCAL_FILES[1]), PRETRAINED)]);

        let weights = ["model.pretrained=/data/weights.safetensors"];
        let error = adapt_with(&weights, false).unwrap_err();
        assert!(error.contains("the job has none: --volume-gb"), "{error}");
        assert!(error.contains("--set model.pretrained=FILE"), "{error}");
        let remote = adapt_with(&weights, true).unwrap();
        assert_eq!(remote.spec.model.pretrained, "/data/weights.safetensors");
    }

    #[test]
    fn unreachable_locations_are_rejected_with_a_remedy() {
        for (entry, expected) in [
            ("data.val=/home/me/val.beton", "--set data.val=s3://"),
            (
                "checkpoint.dir=s3://elsewhere/x",
                "machines may write below s3://bucket/digits/checkpoints",
            ),
            ("checkpoint.dir=/mnt/x", "--volume-gb"),
            ("model.pretrained=weights.safetensors", "not a file on this machine"),
        ] {
            let error = adapt_with(&[entry], false).unwrap_err();
            assert!(error.contains(expected), "{entry}: {error}");
        }
    }
}
