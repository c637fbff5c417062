//! How this machine does: processor, memory, disk and network, and its GPUs if it has any.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use baton_job::{
    exit::Failure,
    message::{Gpu, Host, Vitals},
    session::Event,
};
use nvml_wrapper::{Device, Nvml, enum_wrappers::device::TemperatureSensor, error::NvmlError};
use sysinfo::{CpuRefreshKind, Disks, MemoryRefreshKind, Networks, RefreshKind, System};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, info};

use super::{Input, Queue, crash};

/// How often the coordinator hears that this agent lives, and how its machine does.
const EVERY: Duration = Duration::from_secs(1);

/// What was measured since it was last told.
type Measured = Arc<Mutex<Option<Vitals>>>;

/// Tells again and again that this agent lives, and how its machine does. It is measured by a thread of its own:
/// drivers and disks may take their time, and that says nothing of the agent.
pub(super) fn watch(run_dir: &Path, slots: u32, queue: Queue) -> Result<(), Failure> {
    let run_dir = run_dir.canonicalize().unwrap_or_else(|_| run_dir.to_owned());
    let measured = Measured::default();
    let newest = measured.clone();
    let measure = move || {
        let mut machine = Machine::new(run_dir);
        let gpus = Gpus::find(slots);
        // Until nobody is there to tell it.
        while Arc::strong_count(&newest) > 1 {
            thread::sleep(EVERY);
            let vitals = Vitals { host: machine.measure(), gpus: gpus.measure() };
            if let Ok(mut newest) = newest.lock() {
                *newest = Some(vitals);
            }
        }
    };
    thread::Builder::new()
        .name("vitals".to_owned())
        .spawn(measure)
        .map_err(|error| crash(format!("cannot measure how this machine does: {error}")))?;
    tokio::spawn(async move {
        let mut beats = interval(EVERY);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            let vitals = measured.lock().ok().and_then(|mut newest| newest.take());
            if queue.send(Input::Event(Event::Vitals(vitals))).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// The machine without its GPUs.
struct Machine {
    run_dir: PathBuf,
    system: System,
    networks: Networks,
    disks: Disks,
    measured_at: Instant,
}

impl Machine {
    fn new(run_dir: PathBuf) -> Self {
        let what = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing().with_cpu_usage())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        Self {
            run_dir,
            system: System::new_with_specifics(what),
            networks: Networks::new_with_refreshed_list(),
            disks: Disks::new_with_refreshed_list(),
            measured_at: Instant::now(),
        }
    }

    /// Rates are those since the last time.
    fn measure(&mut self) -> Host {
        self.system.refresh_cpu_usage();
        self.system.refresh_memory();
        self.networks.refresh(true);
        self.disks.refresh(true);
        let seconds = self.measured_at.elapsed().as_secs_f64().max(1e-3);
        self.measured_at = Instant::now();
        let outside = || self.networks.iter().filter(|(name, _)| *name != "lo").map(|(_, net)| net);
        let per_second = |bytes: u64| bytes as f64 / seconds;
        // The deepest mount is the one that holds it.
        let holds = |disk: &&sysinfo::Disk| self.run_dir.starts_with(disk.mount_point());
        let depth = |disk: &&sysinfo::Disk| disk.mount_point().as_os_str().len();
        let disk = self.disks.list().iter().filter(holds).max_by_key(depth);
        Host {
            name: System::host_name().unwrap_or_default(),
            cpu: f64::from(self.system.global_cpu_usage() / 100.0).clamp(0.0, 1.0),
            cpus: u32::try_from(self.system.cpus().len()).unwrap_or(u32::MAX),
            memory_used: self.system.total_memory().saturating_sub(self.system.available_memory()),
            memory_total: self.system.total_memory(),
            disk_free: disk.map_or(0, sysinfo::Disk::available_space),
            disk_total: disk.map_or(0, sysinfo::Disk::total_space),
            received_per_second: per_second(outside().map(sysinfo::NetworkData::received).sum()),
            sent_per_second: per_second(outside().map(sysinfo::NetworkData::transmitted).sum()),
        }
    }
}

/// The GPUs that this agent's ranks use.
struct Gpus {
    driver: Option<Nvml>,
    /// By local rank.
    names: Vec<Name>,
}

/// How a device is named in CUDA_VISIBLE_DEVICES.
#[derive(Debug, PartialEq, Eq)]
enum Name {
    Index(u32),
    Uuid(String),
}

impl Gpus {
    fn find(slots: u32) -> Self {
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let names = names(visible.as_deref(), slots);
        // A machine without a GPU has no driver either.
        let driver = Nvml::init().inspect_err(|error| debug!(%error, "no GPU is told of")).ok();
        if let Some(version) = driver.as_ref().and_then(|nvml| nvml.sys_driver_version().ok()) {
            info!(driver = version, ?names, "GPUs are watched");
        }
        Self { driver, names }
    }

    fn measure(&self) -> Vec<Gpu> {
        let Some(driver) = &self.driver else { return Vec::new() };
        let gpus = (0..).zip(&self.names).filter_map(|(index, name)| {
            let device = match name {
                Name::Index(index) => driver.device_by_index(*index),
                Name::Uuid(uuid) => driver.device_by_uuid(uuid.as_str()),
            };
            // Fewer devices than ranks, or one that has fallen off its bus.
            device.and_then(|device| measure(index, &device)).ok()
        });
        gpus.collect()
    }
}

fn measure(index: u32, device: &Device<'_>) -> Result<Gpu, NvmlError> {
    let memory = device.memory_info()?;
    Ok(Gpu {
        index,
        name: device.name()?,
        uuid: device.uuid()?,
        // Not told of a part of a device (MIG).
        utilisation: device.utilization_rates().ok().map(|rates| f64::from(rates.gpu) / 100.0),
        memory_used: memory.used,
        memory_total: memory.total,
        celsius: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
        watts: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1_000.0),
    })
}

/// The device of each local rank, as CUDA sees them.
fn names(visible: Option<&str>, slots: u32) -> Vec<Name> {
    let most = usize::try_from(slots).unwrap_or(usize::MAX);
    match visible.map(str::trim) {
        None => (0..slots).map(Name::Index).collect(),
        Some(list) => list
            .split(',')
            .map(str::trim)
            // As CUDA has it: whatever follows what is no device is not seen.
            .map_while(|name| match name.parse() {
                Ok(index) => Some(Name::Index(index)),
                Err(_) if name.starts_with("GPU-") || name.starts_with("MIG-") => {
                    Some(Name::Uuid(name.to_owned()))
                }
                Err(_) => None,
            })
            .take(most)
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_tells_of_itself_within_its_bounds() {
        let mut machine = Machine::new(std::env::temp_dir());
        machine.measure();
        let host = machine.measure();
        assert!(host.cpus > 0 && (0.0..=1.0).contains(&host.cpu), "{host:?}");
        assert!(host.memory_used > 0 && host.memory_used < host.memory_total, "{host:?}");
        assert!(host.disk_free <= host.disk_total, "{host:?}");
        assert!(host.received_per_second >= 0.0 && host.sent_per_second >= 0.0, "{host:?}");
    }

    #[test]
    fn ranks_have_the_devices_that_cuda_sees() {
        let index = |numbers: &[u32]| numbers.iter().copied().map(Name::Index).collect::<Vec<_>>();
        assert_eq!(names(None, 2), index(&[0, 1]));
        assert_eq!(names(Some("3, 1"), 2), index(&[3, 1]));
        assert_eq!(names(Some("3,1,2"), 2), index(&[3, 1]));
        assert_eq!(names(Some(""), 2), []);
        assert_eq!(names(Some("2,-1,3"), 3), index(&[2]));
        assert_eq!(names(Some("GPU-8a,0"), 2), [Name::Uuid("GPU-8a".to_owned()), Name::Index(0)]);
    }
}
