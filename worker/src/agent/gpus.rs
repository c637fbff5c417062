//! Queries NVIDIA's driver (NVML) about this node's GPUs. The decisions are made in `baton_job::gpu`.
//!
//! A broken driver answers late or never, so it is queried on separate threads, with a timeout if the agent waits for
//! the answer.

mod errors;

use std::{
    collections::HashMap,
    env, fs, process,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use baton_console::machine;
use baton_job::{
    Time,
    exit::{self, Failure, bad_input, crash},
    gpu::{
        GpuDevice,
        health::{self, GpuHealth},
        reclaim::{MemoryHolder, MemoryReclaim, ReclaimCheck},
        visible::{DEVICE_ORDER, InstalledGpu, VISIBLE_DEVICES, VisibleDevices},
    },
    ids::LocalRank,
    message::GpuStats,
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
use parking_lot::Mutex;
use tokio::{sync::oneshot, time::timeout};
use tracing::{debug, info, warn};

use super::{AgentInput, InputQueue};

/// Timeout of the query for the list of GPUs. Without persistence mode the driver initializes each GPU first, which is
/// slow.
const DETECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of a query about one GPU.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);

/// The GPUs that this agent's ranks use.
pub(super) struct Gpus {
    /// NVIDIA's driver; `None` on a machine without GPUs.
    driver: Option<Nvml>,
    installed: Vec<InstalledGpu>,
    visible: VisibleDevices,
    /// Health of each device when the agent started.
    initial_health: Vec<(GpuDevice, GpuHealth)>,
    /// Why the GPUs could not be detected.
    detection_error: Option<Failure>,
    /// The user's value of [`DEVICE_ORDER`].
    order: Option<String>,
    /// For each local rank, the state of the wait until its device's memory is free.
    reclaims: Mutex<HashMap<LocalRank, MemoryReclaim>>,
    start: Instant,
}

impl Gpus {
    /// Detects the devices of at most `ranks` ranks, and their health.
    pub(super) async fn detect(ranks: Option<u32>) -> Self {
        let detected = on_thread(DETECT_TIMEOUT, move || Self::query(driver(), ranks)).await;
        detected.unwrap_or_else(|| {
            let detection_error = exit::device(format!(
                "NVIDIA's driver did not list the GPUs within {} s: see `nvidia-smi` and `dmesg`, or reboot the node",
                DETECT_TIMEOUT.as_secs()
            ));
            Self { detection_error: Some(detection_error), ..Self::query(None, ranks) }
        })
    }

    fn query(driver: Option<Nvml>, ranks: Option<u32>) -> Self {
        let installed = driver.as_ref().map(installed).unwrap_or_default();
        let list = env::var(VISIBLE_DEVICES).ok();
        let mut visible = VisibleDevices::new(list.as_deref(), &installed);
        visible.devices.truncate(ranks.map_or(usize::MAX, |ranks| ranks as usize));
        let order = env::var(DEVICE_ORDER).ok();
        let (reclaims, start) = (Mutex::default(), Instant::now());
        let (initial_health, detection_error) = (Vec::new(), None);
        let gpus = Self {
            driver,
            installed,
            visible,
            initial_health,
            detection_error,
            order,
            reclaims,
            start,
        };
        let initial_health =
            gpus.visible.devices.iter().map(|device| (device.clone(), gpus.health(device)));
        Self { initial_health: initial_health.collect(), ..gpus }
    }

    /// Checks whether a job may use the GPUs, and sends warnings about them.
    ///
    /// # Errors
    /// A GPU is not healthy, `CUDA_VISIBLE_DEVICES` names no GPU of this machine, or the driver did not answer.
    pub(super) fn check(&self, queue: &InputQueue) -> Result<(), Failure> {
        if let Some(detection_error) = &self.detection_error {
            return Err(detection_error.clone());
        }
        if self.driver.is_none() {
            return Ok(());
        }
        let devices = &self.visible.devices;
        if let Some(unknown) = self.visible.unknown.as_ref().filter(|_| devices.is_empty()) {
            return Err(bad_input(format!(
                "{VISIBLE_DEVICES} names {unknown}, but this machine has no such GPU: `nvidia-smi -L` lists the GPUs; \
                 to use no GPU, set it to an empty value"
            )));
        }
        let names: Vec<_> = devices.iter().map(ToString::to_string).collect();
        info!(devices = names.join(", "), "monitoring GPUs");
        let warnings = self.visible.warnings(self.order.as_deref(), &self.installed);
        for warning in warnings.into_iter().chain(health::check_joining(&self.initial_health)?) {
            warn_user(queue, warning);
        }
        Ok(())
    }

    /// Number of ranks for which this node has devices.
    pub(super) fn count(&self) -> u32 {
        match self.driver {
            Some(_) => u32::try_from(self.visible.devices.len()).unwrap_or(u32::MAX),
            // A container may have the driver's libraries for CUDA, but not those for NVML.
            None => gpu_count(),
        }
    }

    /// Variables for the environment of a rank's process; `None` for the spare, which has no local rank yet.
    pub(super) fn environment(&self, local_rank: Option<LocalRank>) -> Vec<(&str, String)> {
        // A spare is kept only if all ranks see the same devices.
        let local_rank = local_rank.unwrap_or(LocalRank(0));
        self.visible.environment(local_rank.0, self.order.as_deref())
    }

    /// Whether each rank's process sees only its own device.
    pub(super) fn sees_one_device(&self) -> bool {
        self.visible.sees_one_device()
    }

    /// CUDA device number in a rank's process; `None` if the agent knows no device for it.
    pub(super) fn ordinal(&self, local_rank: LocalRank) -> Option<u32> {
        let known = self.device(local_rank).is_some();
        known.then(|| self.visible.ordinal(local_rank.0))
    }

    /// Waits until the memory of a rank's device is free.
    ///
    /// # Errors
    /// No process can use the device.
    pub(super) async fn wait_until_ready(
        self: Arc<Self>,
        local_rank: LocalRank,
        queue: InputQueue,
    ) -> Result<(), Failure> {
        let Some(device) = self.device(local_rank).cloned() else { return Ok(()) };
        self.reclaims.lock().entry(local_rank).or_default().reset();
        loop {
            let (gpus, queried) = (self.clone(), device.clone());
            let answer =
                on_thread(QUERY_TIMEOUT, move || (gpus.health(&queried), gpus.holders(&queried)))
                    .await;
            let Some((health, holders)) = answer else {
                let seconds = QUERY_TIMEOUT.as_secs();
                warn_user(
                    &queue,
                    format!("{device}: the driver did not answer within {seconds} s; see `dmesg`"),
                );
                return Ok(());
            };
            health::check_start(&device, &health)?;
            let ReclaimCheck { warnings, check_again_after } =
                self.check_memory(local_rank, &device, &holders);
            for warning in warnings {
                warn_user(&queue, warning);
            }
            match check_again_after {
                None => return Ok(()),
                Some(pause) => {
                    debug!(%device, ?holders, "memory is not free yet");
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    fn check_memory(
        &self,
        local_rank: LocalRank,
        device: &GpuDevice,
        holders: &[MemoryHolder],
    ) -> ReclaimCheck {
        let now = Time(0).after(self.start.elapsed());
        self.reclaims.lock().entry(local_rank).or_default().check(now, device, holders)
    }

    fn device(&self, local_rank: LocalRank) -> Option<&GpuDevice> {
        self.visible.devices.get(local_rank.0 as usize)
    }

    /// NVML's handle of a device.
    fn handle(&self, device: &GpuDevice) -> Result<nvml_wrapper::Device<'_>, NvmlError> {
        let driver = self.driver.as_ref().ok_or(NvmlError::Uninitialized)?;
        driver.device_by_uuid(device.uuid.as_deref().ok_or(NvmlError::GpuLost)?)
    }

    /// NVML's handle of the whole GPU: `device` itself, or the GPU that it is a part of.
    fn whole_gpu(&self, device: &GpuDevice) -> Result<nvml_wrapper::Device<'_>, NvmlError> {
        let installed = self.installed.get(device.gpu as usize);
        let uuid = installed.and_then(|installed| installed.uuid.clone());
        self.handle(&GpuDevice { uuid, ..device.clone() })
    }

    fn health(&self, device: &GpuDevice) -> GpuHealth {
        match self.whole_gpu(device) {
            Ok(handle) => examine(&handle),
            Err(error) => {
                GpuHealth { lost: matches!(error, NvmlError::GpuLost), ..GpuHealth::default() }
            }
        }
    }

    /// Processes that hold memory of a device, excluding this agent's running ranks.
    fn holders(&self, device: &GpuDevice) -> Vec<MemoryHolder> {
        let processes = self.handle(device).and_then(|handle| handle.running_compute_processes());
        let holders = processes.unwrap_or_default().into_iter().filter_map(|process| {
            let live = live_process(process.pid);
            let is_alive = live.is_some();
            let bytes = match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some(bytes),
                UsedGpuMemory::Unavailable => None,
            };
            let is_ours = live == Some(LiveProcess { parent: process::id() });
            (!is_ours).then_some(MemoryHolder { pid: process.pid, bytes, is_alive })
        });
        holders.collect()
    }

    /// Statistics of the devices, in the order of local ranks.
    pub(super) fn measure(&self) -> Vec<GpuStats> {
        let devices = (0..).zip(&self.visible.devices);
        devices
            .filter_map(|(local_rank, device)| self.measure_one(local_rank, device).ok())
            .collect()
    }

    fn measure_one(&self, index: u32, device: &GpuDevice) -> Result<GpuStats, NvmlError> {
        let (handle, whole) = (self.handle(device)?, self.whole_gpu(device)?);
        let memory = handle.memory_info()?;
        Ok(GpuStats {
            index,
            name: handle.name()?,
            uuid: handle.uuid()?,
            // Not available for a part (MIG).
            utilisation: handle.utilization_rates().ok().map(|rates| f64::from(rates.gpu) / 100.0),
            memory_used: memory.used,
            memory_total: memory.total,
            celsius: whole.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
            watts: whole.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1_000.0),
        })
    }

    /// The local ranks that use a GPU or a part of it.
    fn ranks_of(&self, gpu: u32) -> Vec<LocalRank> {
        let devices = (0..).map(LocalRank).zip(&self.visible.devices);
        devices.filter(|(_, device)| device.gpu == gpu).map(|(local_rank, _)| local_rank).collect()
    }
}

/// Logs a warning and sends it to the coordinator.
fn warn_user(queue: &InputQueue, message: String) {
    warn!("{message}");
    let _ = queue.send(AgentInput::Event(Event::GpuWarning { message }));
}

/// Opens the driver, if there is one.
fn driver() -> Option<Nvml> {
    // A job that uses no GPU must not fail because of a broken driver.
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
            debug!(%error, "no NVIDIA driver was found");
            None
        }
        Err(error) => {
            warn!("GPUs are not monitored: NVIDIA's driver reports: {error}; see `nvidia-smi`");
            None
        }
    }
}

fn installed(driver: &Nvml) -> Vec<InstalledGpu> {
    let count = driver.device_count().unwrap_or_default();
    let found = (0..count).filter_map(|index| match driver.device_by_index(index) {
        Ok(device) => Some(InstalledGpu {
            uuid: device.uuid().ok(),
            model: device.name().unwrap_or_default(),
            parts: parts(&device),
        }),
        // Another user's GPU on a shared machine; CUDA and `nvidia-smi` do not count it either.
        Err(NvmlError::NoPermission) => None,
        Err(error) => {
            warn!("GPU {index} cannot be queried: {error}; see `nvidia-smi`");
            Some(InstalledGpu::default())
        }
    });
    found.collect()
}

/// The UUIDs of a GPU's parts, if it is divided (MIG).
fn parts(device: &nvml_wrapper::Device<'_>) -> Option<Vec<String>> {
    device.mig_mode().ok().filter(|mode| mode.current != 0)?;
    let parts = (0..device.mig_device_count().unwrap_or_default())
        .filter_map(|index| device.mig_device_by_index(index).ok()?.uuid().ok());
    Some(parts.collect())
}

/// The driver's version and its GPUs; `None` without a driver.
pub(crate) fn shown_by_driver() -> Option<(String, Vec<machine::ShownGpu>)> {
    let driver = driver()?;
    let devices = (0..driver.device_count().unwrap_or_default())
        .filter_map(|index| driver.device_by_index(index).ok());
    let gpus = devices.map(|device| {
        let memory = device.memory_info().ok();
        machine::ShownGpu {
            name: device.name().unwrap_or_default(),
            memory_bytes: memory.as_ref().map_or(0, |memory| memory.total),
            memory_free_bytes: memory.as_ref().map_or(0, |memory| memory.free),
            compute: device
                .cuda_compute_capability()
                .ok()
                .map(|compute| (compute.major, compute.minor)),
        }
    });
    let gpus = gpus.collect();
    Some((driver.sys_driver_version().unwrap_or_default(), gpus))
}

/// Reads a GPU's health. A value that it does not support counts as good, because few GPUs support every value.
fn examine(device: &nvml_wrapper::Device<'_>) -> GpuHealth {
    // Every GPU supports this query.
    let reached = device.memory_info().err();
    let uncorrected = device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile);
    let throttled = device.current_throttle_reasons().unwrap_or(ThrottleReasons::empty());
    // GPUs before Ampere retire pages, later ones remap rows.
    let is_retirement_pending = device.are_pages_pending_retired().unwrap_or(false);
    GpuHealth {
        lost: matches!(reached, Some(NvmlError::GpuLost)),
        needs_reset: matches!(reached, Some(NvmlError::ResetRequired)),
        repair_failed: is_set(device, NVML_FI_DEV_REMAPPED_FAILURE),
        uncorrected_errors: uncorrected.unwrap_or(0),
        repair_pending: is_retirement_pending || is_set(device, NVML_FI_DEV_REMAPPED_PENDING),
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

/// A process that has not ended.
#[derive(Debug, PartialEq, Eq)]
struct LiveProcess {
    parent: u32,
}

/// The process with this id; `None` if it has ended, even if its parent has not collected its exit status yet.
fn live_process(pid: u32) -> Option<LiveProcess> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses `/proc/PID/stat` (proc(5)): process id, name in parentheses, state, parent.
fn parse_stat(stat: &str) -> Option<LiveProcess> {
    // The name may contain any character, also parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(LiveProcess { parent })
}

/// Does work that may block on a separate thread; `None` if it takes longer than `limit`.
async fn on_thread<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (answer, answered) = oneshot::channel();
    let work = move || {
        let _ = answer.send(work());
    };
    // Not a thread of the runtime, which would wait for it when it shuts down.
    thread::Builder::new().name("driver".to_owned()).spawn(work).ok()?;
    timeout(limit, answered).await.ok()?.ok()
}

/// Starts the thread that forwards errors that the driver reports.
pub(super) fn watch_errors(gpus: Arc<Gpus>, queue: InputQueue) -> Result<(), Failure> {
    if gpus.visible.devices.is_empty() {
        return Ok(());
    }
    thread::Builder::new()
        .name("gpu-errors".to_owned())
        .spawn(move || errors::watch(&gpus, &queue))
        .map(drop)
        .map_err(|error| {
            crash(format!("cannot start the thread that watches for GPU errors: {error}"))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_processes_are_recognized_whatever_their_name() {
        assert_eq!(parse_stat("7 (a) Z (b) S 41 7 7 0"), Some(LiveProcess { parent: 41 }));
        assert_eq!(parse_stat("7 (rank) Z 41 7 7 0"), None);
        assert_eq!(parse_stat("7 (rank) X 41 7 7 0"), None);
        assert_eq!(parse_stat(""), None);
        let own = LiveProcess { parent: std::os::unix::process::parent_id() };
        assert_eq!(live_process(process::id()), Some(own));
    }

    #[tokio::test]
    async fn driver_that_does_not_answer_is_not_waited_for() {
        let (_never, blocked) = std::sync::mpsc::channel::<()>();
        assert_eq!(on_thread(Duration::ZERO, move || blocked.recv().is_ok()).await, None);
        assert_eq!(on_thread(QUERY_TIMEOUT, || 7).await, Some(7));
    }
}
