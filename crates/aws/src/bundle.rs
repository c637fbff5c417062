//! The files that machines run: the programs of this build, the machine's scripts, the systemd units, the recipe.
//!
//! They are stored in the bucket under the SHA-256 of their list, which the template passes to the machines. So a
//! machine runs exactly what was staged for it, and another build is stored under another name.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use baton_console::{failure::failed, output, programs};
use baton_job::exit::Failure;
use sha2::{Digest, Sha256};

use crate::api::Api;

/// Files that every machine gets, with their path below `/opt/baton`.
const FILES: [(&str, &str); 13] = [
    ("node/boot.sh", include_str!("../../../deploy/aws/node/boot.sh")),
    ("node/cache.sh", include_str!("../../../deploy/aws/node/cache.sh")),
    ("node/credentials.sh", include_str!("../../../deploy/aws/node/credentials.sh")),
    ("node/ended.sh", include_str!("../../../deploy/aws/node/ended.sh")),
    ("node/lib.sh", include_str!("../../../deploy/aws/node/lib.sh")),
    ("node/report.sh", include_str!("../../../deploy/aws/node/report.sh")),
    ("node/volume.sh", include_str!("../../../deploy/aws/node/volume.sh")),
    ("node/units/aws.conf", include_str!("../../../deploy/aws/node/units/aws.conf")),
    (
        "node/units/baton-ended@.service",
        include_str!("../../../deploy/aws/node/units/baton-ended@.service"),
    ),
    (
        "node/units/baton-report.service",
        include_str!("../../../deploy/aws/node/units/baton-report.service"),
    ),
    (
        "node/units/baton-report.timer",
        include_str!("../../../deploy/aws/node/units/baton-report.timer"),
    ),
    ("systemd/baton-agent.service", include_str!("../../../deploy/systemd/baton-agent.service")),
    (
        "systemd/baton-coordinator.service",
        include_str!("../../../deploy/systemd/baton-coordinator.service"),
    ),
];
/// The script that fetches libtorch on the machine.
const SETUP: (&str, &str) = ("scripts/setup.sh", include_str!("../../../scripts/setup.sh"));
const PROGRAMS: [&str; 3] = ["baton", "baton-coordinator", "baton-worker"];
/// The list of all files, as `sha256sum` writes it.
const LIST: &str = "SHA256SUMS";

/// Uploads the files to `s3://BUCKET/JOB/bundle/DIGEST` and returns the digest. `job_url` is `s3://BUCKET/JOB`.
pub(super) fn stage(
    api: &impl Api,
    job_url: &str,
    recipe: &str,
    staged: &[(PathBuf, &str)],
) -> Result<String, Failure> {
    let folder = tempfile::tempdir()
        .map_err(|error| failed(format!("cannot make a temporary folder: {error}")))?;
    let digest = fill(folder.path(), recipe, staged)?;
    sync(api, folder.path(), &format!("{job_url}/bundle/{digest}"))?;
    Ok(digest)
}

fn sync(api: &impl Api, folder: &Path, target: &str) -> Result<(), Failure> {
    output::note(format_args!("uploading the programs to {target}"));
    api.call(&["s3", "sync", "--only-show-errors", &folder.display().to_string(), target])?;
    Ok(())
}

/// Writes the files and returns the digest of their list.
fn fill(folder: &Path, recipe: &str, staged: &[(PathBuf, &str)]) -> Result<String, Failure> {
    let file_error = |path: &Path, error: io::Error| failed(format!("{}: {error}", path.display()));
    for (name, text) in FILES.into_iter().chain([SETUP, ("job.toml", recipe)]) {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(folder);
        fs::create_dir_all(parent)
            .and_then(|()| fs::write(&path, text))
            .map_err(|error| file_error(&path, error))?;
    }
    let bin = folder.join("bin");
    fs::create_dir_all(&bin).map_err(|error| file_error(&bin, error))?;
    for name in PROGRAMS {
        let program = programs::find(name)?;
        strip(&program, &bin.join(name)).map_err(|error| file_error(&program, error))?;
    }
    for (file, name) in staged {
        fs::copy(file, folder.join(name)).map_err(|error| file_error(file, error))?;
    }
    let list = list(folder).map_err(|error| file_error(folder, error))?;
    let path = folder.join(LIST);
    fs::write(&path, &list).map_err(|error| file_error(&path, error))?;
    Ok(hex(&Sha256::digest(list)))
}

/// Copies a program without its debug information, which is three quarters of the file. Copies the whole file if there
/// is no `strip`.
fn strip(program: &Path, to: &Path) -> io::Result<()> {
    let mut command = Command::new("strip");
    command.arg("-o").arg(to).arg(program).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        _ => fs::copy(program, to).map(drop),
    }
}

/// One line `DIGEST  NAME` per file, sorted by name.
fn list(folder: &Path) -> io::Result<String> {
    let mut names = files(folder, Path::new(""))?;
    names.sort();
    let line = |name: PathBuf| {
        let digest = hex(&Sha256::digest(fs::read(folder.join(&name))?));
        Ok(format!("{digest}  {}\n", name.display()))
    };
    names.into_iter().map(line).collect()
}

fn files(folder: &Path, below: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder.join(below))? {
        let entry = entry?;
        let name = below.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => found.extend(files(folder, &name)?),
            false => found.push(name),
        }
    }
    Ok(found)
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::testing::{ScriptedApi, break_each};

    #[test]
    fn a_failed_upload_of_the_programs_ends_the_launch() {
        let answers =
            || ScriptedApi::new().answer("s3 sync --only-show-errors x s3://b/y", Value::Null);
        break_each(answers, |api| sync(api, Path::new("x"), "s3://b/y"));
    }

    #[test]
    fn the_list_names_every_file_by_its_digest_as_sha256sum_does() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("b")).unwrap();
        fs::write(folder.path().join("b/c"), "abc").unwrap();
        fs::write(folder.path().join("a"), "").unwrap();
        assert_eq!(
            list(folder.path()).unwrap(),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855  a\n\
             ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad  b/c\n"
        );
    }

    /// A script that is not staged fails on a machine that costs money.
    #[test]
    fn every_file_of_a_machine_is_staged() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
        let mut in_repository: Vec<String> = Vec::new();
        for (folder, at) in [("aws/node", "node"), ("systemd", "systemd")] {
            let found = files(&root.join(folder), Path::new("")).unwrap();
            in_repository.extend(found.iter().map(|name| format!("{at}/{}", name.display())));
        }
        in_repository.sort();
        let mut staged: Vec<_> = FILES.iter().map(|(name, _)| (*name).to_owned()).collect();
        staged.sort();
        assert_eq!(staged, in_repository);
    }
}
