//! Child processes. Each has a log file and its own process group, and is restarted after a crash a limited number of
//! times.

use std::{
    collections::VecDeque,
    fmt,
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read, Seek, SeekFrom},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use baton_job::{Time, exit::Failure};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::Command;

use crate::failure::{bad_input, failed};

/// Ends a process that writes more to a file than it may.
const SIGXFSZ: i32 = 25;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
}

impl From<ExitStatus> for Exit {
    fn from(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or_default()),
        }
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "ended with exit code {code}"),
            Self::Signal(SIGXFSZ) => {
                write!(
                    f,
                    "was ended by signal {SIGXFSZ}: a file reached the limit of `ulimit -f`, which must be raised"
                )
            }
            Self::Signal(signal) => write!(f, "was ended by signal {signal}"),
        }
    }
}

/// Limits how often a process is restarted: a single crash may be bad luck, repeated crashes are not.
#[derive(Clone, Debug)]
pub(crate) struct RestartLimiter {
    /// Times of recent restarts, oldest first.
    restarts: VecDeque<Time>,
}

impl RestartLimiter {
    /// Maximum number of restarts within [`WINDOW`](Self::WINDOW).
    pub(crate) const MAX_RESTARTS: usize = 5;
    /// Period in which restarts are counted.
    pub(crate) const WINDOW: Duration = Duration::from_secs(60);
    /// Pause before the second restart within the window; it doubles with every further one.
    const FIRST_PAUSE: Duration = Duration::from_millis(250);

    pub(crate) fn new() -> Self {
        Self { restarts: VecDeque::new() }
    }

    /// Records a restart of a process that ended `now`. Returns the pause before it, or `None` if there were too many.
    pub(crate) fn pause(&mut self, now: Time) -> Option<Duration> {
        self.restarts.retain(|restart| now.since(*restart) < Self::WINDOW);
        if self.restarts.len() >= Self::MAX_RESTARTS {
            return None;
        }
        let pause = match u32::try_from(self.restarts.len()) {
            Ok(0) | Err(_) => Duration::ZERO,
            Ok(earlier) => Self::FIRST_PAUSE * 2u32.saturating_pow(earlier - 1),
        };
        self.restarts.push_back(now);
        Some(pause)
    }
}

/// A child process, and its restarts.
pub(crate) struct Child {
    name: &'static str,
    log: PathBuf,
    /// Offset in the log where the output of the current process starts, bytes.
    log_offset: u64,
    limiter: RestartLimiter,
    /// Process group, while the process runs. The process is its leader.
    group: Option<Pid>,
}

impl Child {
    /// A process that is not started yet, and will log to `log`.
    pub(crate) fn new(name: &'static str, log: PathBuf) -> Self {
        Self { name, log, log_offset: 0, limiter: RestartLimiter::new(), group: None }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    pub(crate) fn is_running(&self) -> bool {
        self.group.is_some()
    }

    /// Whether the running process has this id.
    pub(crate) fn has_pid(&self, pid: u32) -> bool {
        self.group.is_some_and(|group| u32::try_from(group.as_raw_pid()) == Ok(pid))
    }

    /// Starts the process. `on_end` is called when it has ended, and must cause a call of [`Self::ended`].
    pub(crate) fn start(
        &mut self,
        mut command: Command,
        on_end: impl FnOnce(Exit) + Send + 'static,
    ) -> Result<(), Failure> {
        let program = PathBuf::from(command.as_std().get_program());
        let explain = |subject: &Path, error: std::io::Error| {
            failed(format!("{}: {error}; the {} cannot be started", subject.display(), self.name))
        };
        let log = open_log(&self.log).map_err(|error| match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => explain(&self.log, error),
            _ => bad_input(format!(
                "the log {} cannot be written: {error}; make its folder writable, or give another one",
                self.log.display()
            )),
        })?;
        let log_offset = log.metadata().map_or(0, |metadata| metadata.len());
        let errors = log.try_clone().map_err(|error| explain(&self.log, error))?;
        let mut process = command
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            // Ctrl-C must reach only `baton up`, which lets its children save first.
            .process_group(0)
            .spawn()
            .map_err(|error| explain(&program, error))?;
        self.log_offset = log_offset;
        self.group = process.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        tokio::spawn(async move {
            // Waiting for a child fails only if other code has already waited for it.
            let status = process.wait().await.unwrap_or_default();
            on_end(Exit::from(status));
        });
        Ok(())
    }

    /// Records the end of the process.
    pub(crate) fn ended(&mut self) {
        self.group = None;
    }

    /// Pause before restarting it, or `None` if it crashed too often.
    pub(crate) fn pause_before_restart(&mut self, now: Time) -> Option<Duration> {
        self.limiter.pause(now)
    }

    /// Sends a signal to the process group, if it is running.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            // The group may just have ended.
            let _ = kill_process_group(group, signal);
        }
    }

    /// The last error message that the current process logged.
    pub(crate) fn last_error(&self) -> Option<String> {
        last_error_in(&self.logged_text()?)
    }

    /// The last line with this text that the current process logged.
    pub(crate) fn last_line_with(&self, text: &str) -> Option<String> {
        self.logged_text()?.lines().rev().find(|line| line.contains(text)).map(str::to_owned)
    }

    /// All that the current process logged.
    fn logged_text(&self) -> Option<String> {
        let mut log = File::open(&self.log).ok()?;
        log.seek(SeekFrom::Start(self.log_offset)).ok()?;
        let mut text = Vec::new();
        log.read_to_end(&mut text).ok()?;
        Some(String::from_utf8_lossy(&text).into_owned())
    }
}

impl Drop for Child {
    /// However `baton up` ends, no process that it started keeps running.
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

fn open_log(path: &Path) -> std::io::Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    OpenOptions::new().create(true).append(true).open(path)
}

/// The last line that begins with `error: `, without this prefix; or the dynamic loader's message about a missing
/// library, with a remedy.
fn last_error_in(text: &str) -> Option<String> {
    text.lines().rev().find_map(|line| {
        match line.split_once("error while loading shared libraries: ") {
            Some((_, library)) => {
                Some(format!(
                    "{library}: `pip install torch==2.11.0` (in a checkout, `make setup`), or set LD_LIBRARY_PATH"
                ))
            }
            None => line.strip_prefix("error: ").map(str::to_owned),
        }
    })
}

#[cfg(test)]
mod tests {
    use baton_job::exit::Class;

    use super::*;

    fn at_secs(seconds: u64) -> Time {
        Time(seconds * 1_000)
    }

    #[test]
    fn the_first_restart_is_immediate_and_each_further_one_waits_twice_as_long() {
        let mut limiter = RestartLimiter::new();
        let pauses: Vec<_> =
            (0..5).map(|second| limiter.pause(at_secs(second)).unwrap().as_millis()).collect();
        assert_eq!(pauses, [0, 250, 500, 1_000, 2_000]);
    }

    #[test]
    fn the_sixth_restart_within_a_minute_is_rejected() {
        let mut limiter = RestartLimiter::new();
        for second in 0..5 {
            assert!(limiter.pause(at_secs(second)).is_some());
        }
        assert_eq!(limiter.pause(at_secs(59)), None);
    }

    #[test]
    fn old_crashes_are_not_counted() {
        let mut limiter = RestartLimiter::new();
        for hour in 0..100 {
            assert_eq!(limiter.pause(at_secs(hour * 3_600)), Some(Duration::ZERO));
        }
    }

    #[test]
    fn a_restart_is_allowed_again_once_the_oldest_is_a_minute_ago() {
        let mut limiter = RestartLimiter::new();
        for second in 0..5 {
            limiter.pause(at_secs(second));
        }
        assert!(limiter.pause(at_secs(60)).is_some());
        assert_eq!(limiter.pause(at_secs(60)), None);
    }

    #[test]
    fn the_last_error_line_is_found_among_other_lines() {
        let unloaded =
            "baton-worker: error while loading shared libraries: libtorch_cpu.so: cannot open";
        assert_eq!(
            last_error_in(unloaded).as_deref(),
            Some(
                "libtorch_cpu.so: cannot open: `pip install torch==2.11.0` (in a checkout, `make setup`), or set \
                 LD_LIBRARY_PATH"
            )
        );
        let log = "INFO serving\nerror: first\nWARN no error: here\nerror: second\nINFO bye\n";
        assert_eq!(last_error_in(log).as_deref(), Some("second"));
        assert_eq!(last_error_in("INFO all good\n"), None);
    }

    #[test]
    fn a_log_that_cannot_be_written_is_bad_input() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("logs"), "").unwrap();
        let mut child = Child::new("shell", folder.path().join("logs/shell.log"));
        let failure = child.start(Command::new("sh"), |_| ()).unwrap_err();
        assert_eq!(failure.class, Class::BadInput, "{failure}");
        assert!(
            failure.message.ends_with("; make its folder writable, or give another one"),
            "{failure}"
        );
    }

    #[tokio::test]
    async fn errors_of_an_earlier_process_in_the_same_log_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Child::new("shell", folder.path().join("logs/shell.log"));
        for (script, expected) in [("echo error: old >&2; exit 3", Some("old")), ("exit 4", None)] {
            let (sender, end) = tokio::sync::oneshot::channel();
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            let is_old = expected == Some("old");
            child.start(command, |exit| sender.send(exit).unwrap()).unwrap();
            assert!(matches!(end.await, Ok(Exit::Code(3 | 4))));
            child.ended();
            assert_eq!(child.last_error().as_deref(), expected);
            assert_eq!(child.last_line_with("old").is_some(), is_old);
        }
    }
}
