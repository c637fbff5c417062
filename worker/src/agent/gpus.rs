//! This node's GPUs, asked of NVIDIA's driver through NVML; what follows is decided in `baton_job::gpu`.
//!
//! A driver in trouble answers late or never. So it is asked by threads of their own, with a deadline where somebody
//! waits for the answer.

mod errors;

use std::{
    collections::HashMap,
    env, fs, process,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use baton_job::{
    Time,
    exit::{self, Failure, bad_input, crash},
    gpu::{
        Device,
        health::{self, Health},
        reclaim::{Holder, Look, Reclaim},
        visible::{DEVICE_ORDER, Installed, VISIBLE_DEVICES, Visible},
    },
    ids::LocalRank,
    message::Gpu,
    session::Event,
};
use baton_trainer::torch::device::gpu_count;
use nvml_wrapper::{
    Nvml,
    bitmasks::device::ThrottleReasons,
    enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor},
    enums::device::{SampleValue, UsedGpuMemory},
    error::NvmlError,
    structs::device::FieldId,
    sys_exports::field_id::{NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING},
};
use tokio::{sync::oneshot, time::timeout};
use tracing::{debug, info, warn};

use super::{Input, Queue};

/// How long the driver may take to tell what GPUs there are. Without its persistence mode it readies each of them
/// first.
const FIND: Duration = Duration::from_secs(60);
/// How long it may take to tell of one of them.
const ASK: Duration = Duration::from_secs(10);

/// The GPUs that this agent's ranks use.
pub(super) struct Gpus {
    /// A machine without a GPU has no driver either.
    driver: Option<Nvml>,
    installed: Vec<Installed>,
    visible: Visible,
    /// How each was when the agent started.
    examined: Vec<(Device, Health)>,
    /// Why nothing is known of the GPUs, though there may be some.
    trouble: Option<Failure>,
    /// The order of GPUs that the user wants.
    order: Option<String>,
    /// Who holds memory of a local rank's device.
    reclaims: Mutex<HashMap<LocalRank, Reclaim>>,
    start: Instant,
}

impl Gpus {
    /// Finds the devices of at most `ranks` ranks, and how they are.
    pub(super) async fn find(ranks: Option<u32>) -> Self {
        let found = aside(FIND, move || Self::ask(driver(), ranks)).await;
        found.unwrap_or_else(|| {
            let trouble = exit::device(format!(
                "NVIDIA's driver does not tell within {} s what GPUs there are: see `nvidia-smi` and `dmesg`, or \
                 reboot the node",
                FIND.as_secs()
            ));
            Self { trouble: Some(trouble), ..Self::ask(None, ranks) }
        })
    }

    fn ask(driver: Option<Nvml>, ranks: Option<u32>) -> Self {
        let installed = driver.as_ref().map(installed).unwrap_or_default();
        let list = env::var(VISIBLE_DEVICES).ok();
        let mut visible = Visible::new(list.as_deref(), &installed);
        visible.devices.truncate(ranks.map_or(usize::MAX, |ranks| ranks as usize));
        let order = env::var(DEVICE_ORDER).ok();
        let (reclaims, start) = (Mutex::default(), Instant::now());
        let (examined, trouble) = (Vec::new(), None);
        let gpus = Self { driver, installed, visible, examined, trouble, order, reclaims, start };
        let examined = gpus.visible.devices.iter().map(|it| (it.clone(), gpus.health(it)));
        Self { examined: examined.collect(), ..gpus }
    }

    /// Whether a job may use them.
    ///
    /// # Errors
    /// One of them is not well, or `CUDA_VISIBLE_DEVICES` names none of them, or the driver did not answer.
    pub(super) fn admit(&self, queue: &Queue) -> Result<(), Failure> {
        if let Some(trouble) = &self.trouble {
            return Err(trouble.clone());
        }
        if self.driver.is_none() {
            return Ok(());
        }
        let devices = &self.visible.devices;
        if let Some(unknown) = self.visible.unknown.as_ref().filter(|_| devices.is_empty()) {
            return Err(bad_input(format!(
                "{VISIBLE_DEVICES} names {unknown}, which is no GPU here: `nvidia-smi -L` shows what is here; empty, \
                 it means to use none"
            )));
        }
        let names: Vec<_> = devices.iter().map(ToString::to_string).collect();
        info!(devices = names.join(", "), "GPUs are watched");
        let warnings = self.visible.warnings(self.order.as_deref(), &self.installed);
        for warning in warnings.into_iter().chain(health::joining(&self.examined)?) {
            tell(queue, warning);
        }
        Ok(())
    }

    /// How many ranks this node has devices for.
    pub(super) fn count(&self) -> u32 {
        match self.driver {
            Some(_) => u32::try_from(self.visible.devices.len()).unwrap_or(u32::MAX),
            // A container may have CUDA's half of the driver and not this one.
            None => gpu_count(),
        }
    }

    /// What is set in the environment of a rank, or of one that has no place yet.
    pub(super) fn environment(&self, local_rank: Option<LocalRank>) -> Vec<(&str, String)> {
        // One without a place is kept only where all see the same devices.
        let local_rank = local_rank.unwrap_or(LocalRank(0));
        self.visible.environment(local_rank.0, self.order.as_deref())
    }

    /// Whether a process must know its place before it sees its device.
    pub(super) fn is_one_each(&self) -> bool {
        self.visible.is_one_each()
    }

    /// The number by which a rank's process knows its device, if this agent knows of one.
    pub(super) fn ordinal(&self, local_rank: LocalRank) -> Option<u32> {
        let known = self.device(local_rank).is_some();
        known.then(|| self.visible.ordinal(local_rank.0))
    }

    /// Waits until the memory of a rank's device is free.
    ///
    /// # Errors
    /// No process can use the device.
    pub(super) async fn ready(
        self: Arc<Self>,
        local_rank: LocalRank,
        queue: Queue,
    ) -> Result<(), Failure> {
        let Some(device) = self.device(local_rank).cloned() else { return Ok(()) };
        if let Ok(mut reclaims) = self.reclaims.lock() {
            reclaims.entry(local_rank).or_default().begin();
        }
        loop {
            let (gpus, asked) = (self.clone(), device.clone());
            let answer = aside(ASK, move || (gpus.health(&asked), gpus.holders(&asked))).await;
            let Some((health, holders)) = answer else {
                let seconds = ASK.as_secs();
                tell(
                    &queue,
                    format!("{device}: its driver does not answer within {seconds} s; see `dmesg`"),
                );
                return Ok(());
            };
            health::starting(&device, &health)?;
            let Look { warnings, again } = self.look(local_rank, &device, &holders);
            for warning in warnings {
                tell(&queue, warning);
            }
            match again {
                None => return Ok(()),
                Some(pause) => {
                    debug!(%device, ?holders, "memory is not free yet");
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    fn look(&self, local_rank: LocalRank, device: &Device, holders: &[Holder]) -> Look {
        let now = Time(0).after(self.start.elapsed());
        let Ok(mut reclaims) = self.reclaims.lock() else { return Look::default() };
        reclaims.entry(local_rank).or_default().look(now, device, holders)
    }

    fn device(&self, local_rank: LocalRank) -> Option<&Device> {
        self.visible.devices.get(local_rank.0 as usize)
    }

    /// The driver's handle of a device.
    fn handle(&self, device: &Device) -> Result<nvml_wrapper::Device<'_>, NvmlError> {
        let driver = self.driver.as_ref().ok_or(NvmlError::Uninitialized)?;
        driver.device_by_uuid(device.uuid.as_deref().ok_or(NvmlError::GpuLost)?)
    }

    /// That of its GPU, which is the same but for a part.
    fn whole(&self, device: &Device) -> Result<nvml_wrapper::Device<'_>, NvmlError> {
        let installed = self.installed.get(device.gpu as usize);
        let uuid = installed.and_then(|installed| installed.uuid.clone());
        self.handle(&Device { uuid, ..device.clone() })
    }

    fn health(&self, device: &Device) -> Health {
        match self.whole(device) {
            Ok(handle) => examine(&handle),
            Err(error) => Health { lost: matches!(error, NvmlError::GpuLost), ..Health::default() },
        }
    }

    /// Who holds memory of a device, this agent's living ranks left out.
    fn holders(&self, device: &Device) -> Vec<Holder> {
        let processes = self.handle(device).and_then(|handle| handle.running_compute_processes());
        let holders = processes.unwrap_or_default().into_iter().filter_map(|process| {
            let standing = standing(process.pid);
            let lives = standing.is_some();
            let bytes = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            };
            let is_ours = standing == Some(Standing { parent: process::id() });
            (!is_ours).then_some(Holder { pid: process.pid, bytes, lives })
        });
        holders.collect()
    }

    /// How the devices do, each by its local rank.
    pub(super) fn measure(&self) -> Vec<Gpu> {
        let devices = (0..).zip(&self.visible.devices);
        devices
            .filter_map(|(local_rank, device)| self.measure_one(local_rank, device).ok())
            .collect()
    }

    fn measure_one(&self, index: u32, device: &Device) -> Result<Gpu, NvmlError> {
        let (handle, whole) = (self.handle(device)?, self.whole(device)?);
        let memory = handle.memory_info()?;
        Ok(Gpu {
            index,
            name: handle.name()?,
            uuid: handle.uuid()?,
            // Not told of a part.
            utilisation: handle.utilization_rates().ok().map(|rates| f64::from(rates.gpu) / 100.0),
            memory_used: memory.used,
            memory_total: memory.total,
            celsius: whole.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
            watts: whole.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1_000.0),
        })
    }

    /// The local ranks that have a GPU or a part of it.
    fn ranks_of(&self, gpu: u32) -> Vec<LocalRank> {
        let devices = (0..).map(LocalRank).zip(&self.visible.devices);
        devices.filter(|(_, device)| device.gpu == gpu).map(|(local_rank, _)| local_rank).collect()
    }
}

/// Says what a user should know here and to the coordinator.
fn tell(queue: &Queue, message: String) {
    warn!("{message}");
    let _ = queue.send(Input::Event(Event::GpuWarning { message }));
}

/// The driver, where there is one.
fn driver() -> Option<Nvml> {
    // Whoever is to use none need not ask, which a driver in trouble may not answer.
    if env::var(VISIBLE_DEVICES).is_ok_and(|list| list.trim().is_empty()) {
        return None;
    }
    match Nvml::init() {
        Ok(driver) => Some(driver),
        Err(
            error @ (NvmlError::LibloadingError(_)
            | NvmlError::LibraryNotFound
            | NvmlError::DriverNotLoaded),
        ) => {
            debug!(%error, "no GPU is told of");
            None
        }
        Err(error) => {
            warn!("GPUs are not watched, as NVIDIA's driver says: {error}; see `nvidia-smi`");
            None
        }
    }
}

fn installed(driver: &Nvml) -> Vec<Installed> {
    let count = driver.device_count().unwrap_or_default();
    let found = (0..count).filter_map(|index| match driver.device_by_index(index) {
        Ok(device) => Some(Installed {
            uuid: device.uuid().ok(),
            model: device.name().unwrap_or_default(),
            parts: parts(&device),
        }),
        // Somebody else's, on a shared machine: neither CUDA nor `nvidia-smi` counts it.
        Err(NvmlError::NoPermission) => None,
        Err(error) => {
            warn!("GPU {index} cannot be asked: {error}");
            Some(Installed::default())
        }
    });
    found.collect()
}

/// The UUIDs of a GPU's parts, if it is divided.
fn parts(device: &nvml_wrapper::Device<'_>) -> Option<Vec<String>> {
    device.mig_mode().ok().filter(|mode| mode.current != 0)?;
    let parts = (0..device.mig_device_count().unwrap_or_default())
        .filter_map(|index| device.mig_device_by_index(index).ok()?.uuid().ok());
    Some(parts.collect())
}

/// What a GPU does not tell counts as good: few have all of it.
fn examine(device: &nvml_wrapper::Device<'_>) -> Health {
    // All can tell this.
    let reached = device.memory_info().err();
    let uncorrected = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    let throttled = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
    // GPUs before Ampere retire pages, later ones remap rows.
    let retires = device.are_pages_pending_retired().unwrap_or(false);
    Health {
        lost: matches!(reached, Some(NvmlError::GpuLost)),
        needs_reset: matches!(reached, Some(NvmlError::ResetRequired)),
        repair_failed: is_set(device, NVML_FI_DEV_REMAPPED_FAILURE),
        uncorrected_errors: uncorrected.unwrap_or(0),
        repair_pending: retires || is_set(device, NVML_FI_DEV_REMAPPED_PENDING),
        too_hot: throttled.contains(ThrottleReasons::HW_THERMAL_SLOWDOWN),
    }
}

fn is_set(device: &nvml_wrapper::Device<'_>, field: u32) -> bool {
    let samples = device.field_values_for(&[FieldId(field)]).unwrap_or_default();
    let values = samples.into_iter().filter_map(|sample| sample.ok()?.value.ok());
    values.into_iter().any(|value| match value {
        SampleValue::U32(value) => value != 0,
        SampleValue::U64(value) => value != 0,
        SampleValue::F64(_) | SampleValue::I64(_) => false,
    })
}

/// A process that lives.
#[derive(Debug, PartialEq, Eq)]
struct Standing {
    parent: u32,
}

/// None of a process that has ended, whether or not its parent has noticed.
fn standing(pid: u32) -> Option<Standing> {
    standing_in(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Reads `/proc/PID/stat`, as proc(5) has it: number, name in parentheses, state, parent.
fn standing_in(stat: &str) -> Option<Standing> {
    // A name may hold anything, parentheses too.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(Standing { parent })
}

/// Does what may take long beside the agent's loop. None if it takes longer than `most`.
async fn aside<T: Send + 'static>(
    most: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (answer, answered) = oneshot::channel();
    let work = move || {
        let _ = answer.send(work());
    };
    // Not of the runtime's own: it would wait for them at its end.
    thread::Builder::new().name("driver".to_owned()).spawn(work).ok()?;
    timeout(most, answered).await.ok()?.ok()
}

/// Passes on the errors that the driver tells of.
pub(super) fn watch_errors(gpus: Arc<Gpus>, queue: Queue) -> Result<(), Failure> {
    if gpus.visible.devices.is_empty() {
        return Ok(());
    }
    thread::Builder::new()
        .name("gpu-errors".to_owned())
        .spawn(move || errors::watch(&gpus, &queue))
        .map(drop)
        .map_err(|error| crash(format!("cannot watch for errors of GPUs: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_lives_until_it_has_ended_whatever_its_name() {
        assert_eq!(standing_in("7 (a) Z (b) S 41 7 7 0"), Some(Standing { parent: 41 }));
        assert_eq!(standing_in("7 (rank) Z 41 7 7 0"), None);
        assert_eq!(standing_in("7 (rank) X 41 7 7 0"), None);
        assert_eq!(standing_in(""), None);
        let own = Standing { parent: std::os::unix::process::parent_id() };
        assert_eq!(standing(process::id()), Some(own));
    }

    #[tokio::test]
    async fn a_driver_that_does_not_answer_is_not_waited_for() {
        let (_never, blocked) = std::sync::mpsc::channel::<()>();
        assert_eq!(aside(Duration::ZERO, move || blocked.recv().is_ok()).await, None);
        assert_eq!(aside(ASK, || 7).await, Some(7));
    }
}
