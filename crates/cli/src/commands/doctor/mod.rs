//! `baton doctor`: what this machine has, and what will not work on it.

mod checks;

use std::{
    env,
    fs::{self, File},
    io::{self, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use baton_console::{json, machine::Machine, programs};
use baton_job::exit::Failure;
use rustix::{
    fs::{FlockOperation, flock, statvfs},
    process::{Resource, getrlimit},
};

use tokio::{process::Command, time::timeout};

use self::checks::{DoctorCheck, Facts, Folder, OtherProgram, Trial, Verdict, checks};
use crate::{
    connect::{DEFAULT_LISTEN, RUNS},
    failure::bad_input,
};

/// Check this machine: programs, libtorch, GPUs, memory, disk, clock, port
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton doctor
  baton doctor --run-dir /content/drive/MyDrive/runs/cats      whether a run can be there
  baton doctor --json | jq 'select(.verdict != \"ok\")'

Nothing is changed: a trial file in the run folder is removed again. On a machine with a GPU,
`baton-worker gpu-check` then computes with it.

Exit code 2: something does not work; its line says what to do.")]
pub(crate) struct Args {
    /// Folder in which a run will be
    #[arg(long, value_name = "DIR", default_value = RUNS)]
    run_dir: PathBuf,
    /// Print a JSON object per check
    #[arg(long)]
    json: bool,
}

/// A driver that hangs makes the worker hang.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) async fn run(args: &Args) -> Result<(), Failure> {
    let found = checks(&facts(&args.run_dir).await);
    for check in &found {
        json::print(args.json, check, text);
    }
    match found.iter().filter(|check| check.verdict == Verdict::Problem).count() {
        0 => Ok(()),
        1 => Err(bad_input("1 check found a problem")),
        problems => Err(bad_input(format!("{problems} checks found problems"))),
    }
}

fn text(check: &DoctorCheck) -> String {
    let verdict = match check.verdict {
        Verdict::Ok => "ok",
        Verdict::Warning => "warning",
        Verdict::Problem => "PROBLEM",
    };
    let remedy = check.remedy.as_ref().map(|remedy| format!(": {remedy}")).unwrap_or_default();
    format!("{verdict:<8} {:<11} {}{remedy}", check.check, check.detail)
}

async fn facts(run_dir: &Path) -> Facts {
    let seconds =
        |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let this = env::current_exe().and_then(fs::metadata);
    let mut programs = Vec::new();
    for name in ["baton-coordinator", "baton-worker"] {
        programs.push((name, program(name).await));
    }
    Facts {
        version: baton_build_info::VERSION,
        programs,
        machine: machine().await,
        has_avx2: has_avx2(),
        folder: folder(run_dir),
        open_files: getrlimit(Resource::Nofile).current,
        file_bytes: getrlimit(Resource::Fsize).current,
        unix_seconds: seconds(SystemTime::now()),
        installed_at: this.and_then(|program| program.modified()).ok().map(seconds),
        listen: (
            DEFAULT_LISTEN,
            TcpListener::bind(DEFAULT_LISTEN).err().map(|error| error.to_string()),
        ),
    }
}

/// What a program prints, or why it fails.
async fn printed(name: &str, arguments: &[&str]) -> Result<String, String> {
    let path = programs::find(name).map_err(|failure| failure.message)?;
    let output = Command::new(&path).args(arguments).kill_on_drop(true).output();
    let Ok(output) = timeout(ANSWER_TIMEOUT, output).await else {
        return Err(format!(
            "{} {} has not answered in {} s; a GPU's driver may hang: see `nvidia-smi` and `dmesg`",
            path.display(),
            arguments.join(" "),
            ANSWER_TIMEOUT.as_secs()
        ));
    };
    let output = output.map_err(|error| format!("{} cannot be run: {error}", path.display()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let line = errors.lines().find(|line| !line.trim().is_empty()).unwrap_or("it printed nothing");
    Err(format!("{} ended with {}: {line}", path.display(), output.status))
}

async fn program(name: &'static str) -> OtherProgram {
    if programs::find(name).is_err() {
        return OtherProgram::Missing;
    }
    match printed(name, &["--version"]).await {
        Err(problem) => OtherProgram::Broken(problem),
        // The name, and the version.
        Ok(line) => {
            let version = line.trim().split_once(' ').map_or("unknown", |(_, version)| version);
            OtherProgram::Version(version.to_owned())
        }
    }
}

pub(crate) async fn machine() -> Result<Machine, String> {
    let printed = printed("baton-worker", &["machine", "--json"]).await?;
    serde_json::from_str(&printed).map_err(|error| format!("its answer is no JSON: {error}"))
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> Option<bool> {
    Some(std::arch::is_x86_feature_detected!("avx2"))
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> Option<bool> {
    None
}

fn folder(path: &Path) -> Folder {
    // What `baton up` makes does not exist yet.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let existing = path.ancestors().find(|folder| folder.exists());
    // The working folder, if a path is relative.
    let existing = existing.filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    let space = statvfs(existing).ok();
    Folder {
        file_system: file_system(existing),
        free_bytes: space.map(|space| space.f_bavail.saturating_mul(space.f_frsize)),
        trial: if existing.is_dir() {
            trial(existing).map_err(|error| error.to_string())
        } else {
            Err(format!("{} is not a folder", existing.display()))
        },
        path: path.display().to_string(),
    }
}

/// The kernel's name of the file system of a folder: that of the longest mount point above it.
fn file_system(folder: &Path) -> Option<String> {
    let folder = folder.canonicalize().ok()?;
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mounts = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        // Spaces in names.
        let point = PathBuf::from(fields.next()?.replace("\\040", " "));
        Some((point, fields.next()?.to_owned()))
    });
    let above = mounts.filter(|(point, _)| folder.starts_with(point));
    // The last of equal ones hides the others.
    above.max_by_key(|(point, _)| point.as_os_str().len()).map(|(_, kind)| kind)
}

/// Writes, locks and renames a file, as a run does.
fn trial(folder: &Path) -> io::Result<Trial> {
    let names = ["trial", "renamed"]
        .map(|name| folder.join(format!(".baton-doctor-{}-{name}", std::process::id())));
    let result = try_in(&names);
    for name in names {
        let _ = fs::remove_file(name);
    }
    result
}

fn try_in([path, renamed]: &[PathBuf; 2]) -> io::Result<Trial> {
    let start = Instant::now();
    let mut file = File::create_new(path)?;
    file.write_all(&[0; 1 << 16])?;
    file.sync_all()?;
    fs::rename(path, renamed)?;
    let elapsed: Duration = start.elapsed();
    let lock = FlockOperation::NonBlockingLockExclusive;
    let other = File::open(renamed)?;
    let has_locks = flock(&file, lock).is_ok() && flock(&other, lock).is_err();
    Ok(Trial { sync_seconds: elapsed.as_secs_f64(), has_locks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_leaves_nothing_behind_and_a_folder_that_does_not_exist_is_that_above_it() {
        let base = tempfile::tempdir().unwrap();
        let found = folder(&base.path().join("runs/digits"));
        assert!(found.trial.unwrap().has_locks);
        assert!(found.free_bytes.unwrap() > 0 && !found.file_system.unwrap().is_empty());
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_file_system_is_that_of_the_longest_mount_point() {
        assert_eq!(file_system(Path::new("/proc/self")).as_deref(), Some("proc"));
        assert_eq!(file_system(Path::new("/nowhere")), None);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_refused_in_words() {
        let refused = folder(Path::new("/proc")).trial.unwrap_err();
        assert!(!refused.is_empty(), "{refused}");
        let file = tempfile::NamedTempFile::new().unwrap();
        let refused = folder(&file.path().join("runs")).trial.unwrap_err();
        assert!(refused.ends_with("is not a folder"), "{refused}");
    }
}
