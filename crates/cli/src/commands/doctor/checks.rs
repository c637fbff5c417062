//! What is wrong with a machine. Pure.

use baton_console::{human, machine::Machine};
use serde::Serialize;

/// What was found on a machine.
#[derive(Debug)]
pub(super) struct Facts {
    /// Version of this program.
    pub(super) version: &'static str,
    /// The other programs by name.
    pub(super) programs: Vec<(&'static str, OtherProgram)>,
    /// What `baton-worker machine` printed, or why not.
    pub(super) machine: Result<Machine, String>,
    /// Whether the processor has AVX2; `None` if it is no x86-64.
    pub(super) has_avx2: Option<bool>,
    pub(super) folder: Folder,
    pub(super) open_files: Option<u64>,
    /// Largest size of a file that may be written, bytes.
    pub(super) file_bytes: Option<u64>,
    pub(super) unix_seconds: u64,
    /// When this program was installed.
    pub(super) installed_at: Option<u64>,
    /// Address where `baton up` listens by default, and why it cannot.
    pub(super) listen: (&'static str, Option<String>),
}

/// Another program of Baton.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OtherProgram {
    Missing,
    /// Why it does not start.
    Broken(String),
    Version(String),
}

/// The folder of runs.
#[derive(Debug)]
pub(super) struct Folder {
    pub(super) path: String,
    /// The kernel's name of its file system.
    pub(super) file_system: Option<String>,
    pub(super) free_bytes: Option<u64>,
    pub(super) trial: Result<Trial, String>,
}

/// What a trial in a folder showed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    /// Seconds until a small file was on the disk.
    pub(super) sync_seconds: f64,
    /// Whether a locked file cannot be locked again.
    pub(super) has_locks: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    Ok,
    /// It works, but slower or less safely.
    Warning,
    /// It does not work.
    Problem,
}

/// A finding.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct DoctorCheck {
    pub(super) check: &'static str,
    pub(super) verdict: Verdict,
    pub(super) detail: String,
    pub(super) remedy: Option<String>,
}

/// The version of libtorch whose results are the same bits everywhere.
const LIBTORCH: &str = "2.11.";
const LEAST_MEMORY: u64 = 2_000_000_000;
const LEAST_DISK: u64 = 5_000_000_000;
const LEAST_OPEN_FILES: u64 = 1_024;
/// A disk takes a few milliseconds.
const SLOW_SYNC_SECONDS: f64 = 0.2;
/// Share of a GPU's memory that its driver uses at most.
const USED_BY_DRIVER: f64 = 0.1;
/// The first generation with bf16, Ampere.
const BF16_SINCE: (i32, i32) = (8, 0);

impl DoctorCheck {
    fn ok(check: &'static str, detail: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Ok, detail: detail.into(), remedy: None }
    }

    fn warning(check: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        let remedy = Some(remedy.into());
        Self { check, verdict: Verdict::Warning, detail: detail.into(), remedy }
    }

    fn problem(check: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { verdict: Verdict::Problem, ..Self::warning(check, detail, remedy) }
    }
}

/// Checks everything.
pub(super) fn checks(facts: &Facts) -> Vec<DoctorCheck> {
    let mut checks = vec![programs(facts)];
    match &facts.machine {
        Ok(machine) => {
            checks.push(libtorch(machine));
            checks.push(processor(machine.cores, facts.has_avx2));
            checks.push(memory(machine));
            checks.push(gpus(machine));
            checks.extend(nccl(machine));
        }
        // Reported already.
        Err(_) if checks.iter().any(|check| check.verdict == Verdict::Problem) => {}
        Err(problem) => checks.push(DoctorCheck::problem(
            "libtorch",
            format!("baton-worker does not start: {problem}"),
            "install PyTorch 2.11 into the Python that has Baton: `pip install torch==2.11.0`; in a checkout, `make build`",
        )),
    }
    checks.push(folder(&facts.folder));
    checks.push(open_files(facts.open_files));
    checks.extend(facts.file_bytes.map(file_size));
    checks.push(clock(facts));
    checks.push(port(&facts.listen));
    checks
}

fn programs(facts: &Facts) -> DoctorCheck {
    let problem = |detail| {
        let remedy =
            "install the three programs together, from one version; in a checkout, `make build`";
        DoctorCheck::problem("programs", detail, remedy)
    };
    for (name, program) in &facts.programs {
        match program {
            OtherProgram::Missing => {
                return problem(format!("{name} is neither beside baton nor on the PATH"));
            }
            OtherProgram::Version(version) if version != facts.version => {
                return problem(format!("{name} is {version}, and baton is {}", facts.version));
            }
            // Its libraries are another check.
            OtherProgram::Broken(_) if facts.machine.is_err() => {}
            OtherProgram::Broken(why) => return problem(format!("{name} does not start: {why}")),
            OtherProgram::Version(_) => {}
        }
    }
    let others: Vec<&str> = facts.programs.iter().map(|(name, _)| *name).collect();
    DoctorCheck::ok("programs", format!("baton {}, with {}", facts.version, others.join(" and ")))
}

fn libtorch(machine: &Machine) -> DoctorCheck {
    let version = &machine.libtorch;
    if version.starts_with(LIBTORCH) {
        return DoctorCheck::ok("libtorch", version);
    }
    let detail = format!("{version}; Baton is built for {LIBTORCH}x");
    DoctorCheck::warning(
        "libtorch",
        detail,
        "`pip install torch==2.11.0`: others may round differently",
    )
}

fn processor(cores: u64, has_avx2: Option<bool>) -> DoctorCheck {
    let cores = human::count(cores, "core");
    match has_avx2 {
        Some(true) => DoctorCheck::ok("processor", format!("{cores}, AVX2")),
        Some(false) => DoctorCheck::warning(
            "processor",
            format!("{cores} without AVX2"),
            "the loader and training on the CPU are slow here: rent a machine with a processor of 2015 or later",
        ),
        None => DoctorCheck::warning(
            "processor",
            format!("{cores}, not x86-64"),
            "Baton is tested on x86-64 only",
        ),
    }
}

fn memory(machine: &Machine) -> DoctorCheck {
    let Machine { memory_bytes, memory_available_bytes, .. } = *machine;
    let detail = format!(
        "{}, {} available",
        human::bytes(memory_bytes),
        human::bytes(memory_available_bytes)
    );
    if memory_available_bytes >= LEAST_MEMORY {
        return DoctorCheck::ok("memory", detail);
    }
    let remedy =
        "a rank of ResNet-50 needs about 2 GB: end other programs, or take a larger machine";
    DoctorCheck::warning("memory", detail, remedy)
}

fn gpus(machine: &Machine) -> DoctorCheck {
    let name = "GPUs";
    if let Some(problem) = &machine.gpu_problem {
        return DoctorCheck::problem(name, problem, "`baton-worker gpu-check` shows more");
    }
    let Some(driver) = &machine.driver else {
        return DoctorCheck::ok(name, "none, and no NVIDIA driver: trains on the CPU");
    };
    let Some(first) = machine.gpus.first() else {
        return DoctorCheck::ok(
            name,
            format!("none that driver {driver} shows: trains on the CPU"),
        );
    };
    let same = machine.gpus.iter().all(|gpu| gpu.name == first.name);
    let models = match machine.gpus.len() {
        count if same => format!("{count} x {}", first.name),
        _ => machine.gpus.iter().map(|gpu| gpu.name.as_str()).collect::<Vec<_>>().join(", "),
    };
    let detail = format!("{models}, {} each, driver {driver}", human::bytes(first.memory_bytes));
    let is_used = |gpu: &baton_console::machine::ShownGpu| {
        (gpu.memory_free_bytes as f64) < (1.0 - USED_BY_DRIVER) * gpu.memory_bytes as f64
    };
    if let Some(used) = machine.gpus.iter().position(is_used) {
        let free = human::bytes(machine.gpus[used].memory_free_bytes);
        return DoctorCheck::warning(
            name,
            format!("{detail}; GPU {used} has only {free} free"),
            "another process uses it: `nvidia-smi` shows which",
        );
    }
    if machine.gpus.iter().any(|gpu| gpu.compute.is_some_and(|compute| compute < BF16_SINCE)) {
        return DoctorCheck::warning(
            name,
            format!("{detail}; without bf16 in hardware"),
            "`--set precision.compute=fp16`, as the recipes for T4 have it",
        );
    }
    DoctorCheck::ok(name, detail)
}

fn nccl(machine: &Machine) -> Option<DoctorCheck> {
    match &machine.nccl {
        Some(version) => Some(DoctorCheck::ok("NCCL", version)),
        None if machine.gpus.len() > 1 => Some(DoctorCheck::problem(
            "NCCL",
            "libnccl.so.2 was not found, and several GPUs need it",
            "install torch from its CUDA wheel, which brings NCCL: `pip install torch==2.11.0`",
        )),
        None => None,
    }
}

fn folder(folder: &Folder) -> DoctorCheck {
    let name = "run folder";
    let path = &folder.path;
    let trial = match &folder.trial {
        Ok(trial) => trial,
        Err(problem) => {
            let detail = format!("{path}: {problem}");
            return DoctorCheck::problem(name, detail, "name another folder with --run-dir");
        }
    };
    let file_system = folder.file_system.as_deref().unwrap_or("unknown");
    let free = folder.free_bytes.map_or_else(|| "unknown".to_owned(), human::bytes);
    let detail = format!(
        "{path}: {free} free, {file_system}, a file is safe after {:.0} ms",
        trial.sync_seconds * 1e3
    );
    let elsewhere = "keep the run folder on the local disk, and only its checkpoints here: \
                     `--run-dir DIR --set checkpoint.dir=FOLDER`";
    if file_system.starts_with("fuse") || trial.sync_seconds > SLOW_SYNC_SECONDS {
        return DoctorCheck::warning(
            name,
            format!("{detail}; it is slow or not a disk"),
            elsewhere,
        );
    }
    if file_system == "tmpfs" {
        let remedy =
            "name a folder on a disk with --run-dir, or a bucket with --set checkpoint.dir=s3://…";
        return DoctorCheck::warning(name, format!("{detail}; it ends with the machine"), remedy);
    }
    if !trial.has_locks {
        return DoctorCheck::warning(name, format!("{detail}; it has no file locks"), elsewhere);
    }
    if folder.free_bytes.is_some_and(|free| free < LEAST_DISK) {
        let remedy =
            "checkpoints may not fit: make room, lower checkpoint.keep_last, or set checkpoint.dir";
        return DoctorCheck::warning(name, detail, remedy);
    }
    DoctorCheck::ok(name, detail)
}

fn open_files(limit: Option<u64>) -> DoctorCheck {
    let name = "open files";
    match limit {
        None => DoctorCheck::ok(name, "no limit"),
        Some(limit) if limit >= LEAST_OPEN_FILES => {
            DoctorCheck::ok(name, format!("at most {}", human::grouped(limit)))
        }
        Some(limit) => DoctorCheck::warning(
            name,
            format!("at most {}", human::grouped(limit)),
            "`ulimit -n 65536` before `baton up`: connections and shards need them",
        ),
    }
}

fn file_size(limit: u64) -> DoctorCheck {
    DoctorCheck::warning(
        "file size",
        format!("files of at most {} may be written", human::bytes(limit)),
        "`ulimit -f unlimited` before `baton up`: a larger checkpoint cannot be saved",
    )
}

fn clock(facts: &Facts) -> DoctorCheck {
    let now = human::utc(facts.unix_seconds);
    let day = 86_400;
    if facts.installed_at.is_some_and(|installed| facts.unix_seconds + day < installed) {
        return DoctorCheck::problem(
            "clock",
            format!("{now}, before this program was installed"),
            "set the clock: certificates, tokens and cloud services refuse a wrong one",
        );
    }
    DoctorCheck::ok("clock", now)
}

fn port((address, problem): &(&'static str, Option<String>)) -> DoctorCheck {
    match problem {
        None => DoctorCheck::ok("port", format!("{address} is free")),
        Some(problem) => DoctorCheck::warning(
            "port",
            format!("{address}: {problem}"),
            "`baton status` shows whether a job runs there; start another with --listen 127.0.0.1:0",
        ),
    }
}

#[cfg(test)]
mod tests {
    use baton_console::machine::ShownGpu;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn machine() -> Machine {
        Machine {
            libtorch: "2.11.0".to_owned(),
            cores: 2,
            memory_bytes: 16 * GIB,
            memory_available_bytes: 12 * GIB,
            ..Machine::default()
        }
    }

    fn a100(memory_free_bytes: u64) -> ShownGpu {
        let name = "NVIDIA A100-SXM4-40GB".to_owned();
        ShownGpu { name, memory_bytes: 40 * GIB, memory_free_bytes, compute: Some((8, 0)) }
    }

    fn good() -> Facts {
        Facts {
            version: "1.0",
            programs: vec![
                ("baton-coordinator", OtherProgram::Version("1.0".to_owned())),
                ("baton-worker", OtherProgram::Version("1.0".to_owned())),
            ],
            machine: Ok(machine()),
            has_avx2: Some(true),
            folder: Folder {
                path: "runs".to_owned(),
                file_system: Some("ext4".to_owned()),
                free_bytes: Some(100 * GIB),
                trial: Ok(Trial { sync_seconds: 0.003, has_locks: true }),
            },
            open_files: Some(65_536),
            file_bytes: None,
            unix_seconds: 1_800_000_000,
            installed_at: Some(1_790_000_000),
            listen: ("127.0.0.1:29600", None),
        }
    }

    /// The findings that are not good, each in one line.
    fn found(facts: &Facts) -> Vec<String> {
        let bad = checks(facts).into_iter().filter(|check| check.verdict != Verdict::Ok);
        let line = |check: DoctorCheck| {
            let remedy = check.remedy.unwrap_or_default();
            assert!(!remedy.is_empty(), "{} has no remedy", check.check);
            format!("{:?} {}: {} | {remedy}", check.verdict, check.check, check.detail)
        };
        bad.map(line).collect()
    }

    fn only(facts: &Facts) -> String {
        let found = found(facts);
        assert_eq!(found.len(), 1, "{found:?}");
        found.into_iter().next().unwrap_or_default()
    }

    #[test]
    fn a_good_machine_has_no_findings() {
        assert_eq!(found(&good()), Vec::<String>::new());
        let gpus = vec![a100(39 * GIB); 8];
        let driver = Some("580.65".to_owned());
        let nccl = Some("2.28".to_owned());
        let with_gpus =
            Facts { machine: Ok(Machine { driver, gpus, nccl, ..machine() }), ..good() };
        assert_eq!(found(&with_gpus), Vec::<String>::new());
        let detail =
            checks(&with_gpus).into_iter().find(|check| check.check == "GPUs").unwrap().detail;
        assert_eq!(detail, "8 x NVIDIA A100-SXM4-40GB, 42.9 GB each, driver 580.65");
    }

    #[test]
    fn programs_of_different_versions_and_missing_ones_are_problems() {
        let mut facts = good();
        facts.programs[1].1 = OtherProgram::Version("0.9".to_owned());
        assert!(only(&facts).contains("programs: baton-worker is 0.9, and baton is 1.0 | install"));
        facts.programs[0].1 = OtherProgram::Broken("killed".to_owned());
        assert!(only(&facts).contains("programs: baton-coordinator does not start: killed"));

        let mut facts = Facts { machine: Err("not found".to_owned()), ..good() };
        facts.programs[1].1 = OtherProgram::Missing;
        assert!(
            only(&facts).contains("programs: baton-worker is neither beside baton nor on the PATH")
        );
        facts.programs[1].1 = OtherProgram::Broken("libtorch_cpu.so: not found".to_owned());
        assert!(only(&facts).contains("baton-worker does not start: not found | install PyTorch"));
    }

    #[test]
    fn what_a_machine_lacks_is_a_warning() {
        let with = |machine| Facts { machine: Ok(machine), ..good() };
        let other = Machine { libtorch: "2.10.0".to_owned(), ..machine() };
        assert!(only(&with(other)).contains("2.10.0; Baton is built for 2.11.x"));
        let small = Machine { memory_available_bytes: GIB, ..machine() };
        assert!(only(&with(small)).contains("1.1 GB available"));
        assert!(only(&Facts { has_avx2: Some(false), ..good() }).contains("2 cores without AVX2"));
        assert!(only(&Facts { has_avx2: None, ..good() }).contains("not x86-64"));
        assert!(only(&Facts { open_files: Some(256), ..good() }).contains("ulimit -n"));
        let limited = only(&Facts { file_bytes: Some(61_000_000), ..good() });
        assert!(limited.contains("files of at most 61.0 MB") && limited.contains("ulimit -f"));
        let taken = Some("in use".to_owned());
        assert!(only(&Facts { listen: ("127.0.0.1:29600", taken), ..good() }).contains("--listen"));
    }

    #[test]
    fn gpus_that_cannot_be_used_or_are_used_by_others_are_named() {
        let with = |gpus: Vec<ShownGpu>| {
            let driver = Some("580.65".to_owned());
            let nccl = Some("2.28".to_owned());
            Facts { machine: Ok(Machine { driver, gpus, nccl, ..machine() }), ..good() }
        };
        let used = only(&with(vec![a100(39 * GIB), a100(10 * GIB)]));
        assert!(used.contains("GPU 1 has only 10.7 GB free | another process"), "{used}");
        let t4 = ShownGpu { name: "Tesla T4".to_owned(), compute: Some((7, 5)), ..a100(39 * GIB) };
        assert!(
            only(&with(vec![t4]))
                .contains("1 x Tesla T4, 42.9 GB each, driver 580.65; without bf16")
        );

        let mut facts = with(vec![a100(39 * GIB); 2]);
        let machine = facts.machine.as_mut().unwrap();
        machine.nccl = None;
        assert!(only(&facts).starts_with("Problem NCCL: libnccl.so.2 was not found"));
        let machine = facts.machine.as_mut().unwrap();
        machine.gpu_problem = Some("CUDA half does not load".to_owned());
        machine.nccl = Some("2.28".to_owned());
        assert!(only(&facts).starts_with("Problem GPUs: CUDA half does not load"));
    }

    #[test]
    fn folders_that_are_no_disk_slow_full_or_read_only_are_named() {
        let with = |change: fn(&mut Folder)| {
            let mut facts = good();
            change(&mut facts.folder);
            only(&facts)
        };
        let drive = with(|folder| folder.file_system = Some("fuse.drive".to_owned()));
        assert!(drive.contains("--set checkpoint.dir=FOLDER"), "{drive}");
        let memory = with(|folder| folder.file_system = Some("tmpfs".to_owned()));
        assert!(memory.contains("it ends with the machine"), "{memory}");
        let slow = with(|folder| folder.trial = Ok(Trial { sync_seconds: 1.5, has_locks: true }));
        assert!(slow.contains("a file is safe after 1500 ms; it is slow"), "{slow}");
        let unlocked =
            with(|folder| folder.trial = Ok(Trial { sync_seconds: 0.01, has_locks: false }));
        assert!(unlocked.contains("no file locks"), "{unlocked}");
        assert!(with(|folder| folder.free_bytes = Some(GIB)).contains("1.1 GB free"));
        let refused = with(|folder| folder.trial = Err("read-only".to_owned()));
        assert!(refused.starts_with("Problem run folder: runs: read-only"), "{refused}");
    }

    #[test]
    fn a_clock_before_the_installation_is_a_problem() {
        let facts = Facts { unix_seconds: 1_000_000_000, ..good() };
        assert!(
            only(&facts).starts_with("Problem clock: 2001-09-09T01:46:40Z, before"),
            "{}",
            only(&facts)
        );
    }
}
