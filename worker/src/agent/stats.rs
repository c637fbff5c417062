//! Machine statistics: processor, memory, disk, network and GPUs.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use baton_job::{
    exit::{Failure, crash},
    message::{HostStats, MachineStats},
    session::Event,
};
use parking_lot::Mutex;
use rustix::fs::statvfs;
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, Networks, RefreshKind, System};
use tokio::time::{MissedTickBehavior, interval};

use super::{AgentInput, InputQueue, gpus::Gpus};

/// Time between two heartbeats of this agent, and between two measurements of the machine.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The newest statistics, until they are sent.
type NewestStats = Arc<Mutex<Option<MachineStats>>>;

/// Puts a heartbeat with the newest machine statistics into the queue at regular intervals. A separate thread measures:
/// drivers and disks may be slow, and that must not delay heartbeats.
pub(super) fn watch(run_dir: &Path, gpus: Arc<Gpus>, queue: InputQueue) -> Result<(), Failure> {
    let run_dir = run_dir.canonicalize().unwrap_or_else(|_| run_dir.to_owned());
    let measured = NewestStats::default();
    let newest = measured.clone();
    let measure = move || {
        let mut machine = HostMeter::new(run_dir);
        // Until the task that sends heartbeats has ended.
        while Arc::strong_count(&newest) > 1 {
            thread::sleep(HEARTBEAT_INTERVAL);
            let stats = MachineStats { host: machine.measure(), gpus: gpus.measure() };
            *newest.lock() = Some(stats);
        }
    };
    thread::Builder::new().name("stats".to_owned()).spawn(measure).map_err(|error| {
        crash(format!("cannot start the thread for machine statistics: {error}"))
    })?;
    tokio::spawn(async move {
        let mut ticks = interval(HEARTBEAT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let stats = measured.lock().take();
            if queue.send(AgentInput::Event(Event::MachineStats(stats))).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// Measures the machine, excluding its GPUs.
struct HostMeter {
    run_dir: PathBuf,
    system: System,
    networks: Networks,
    measured_at: Instant,
}

impl HostMeter {
    fn new(run_dir: PathBuf) -> Self {
        let measured = RefreshKind::nothing()
            .with_cpu(CpuRefreshKind::nothing().with_cpu_usage())
            .with_memory(MemoryRefreshKind::nothing().with_ram());
        Self {
            run_dir,
            system: System::new_with_specifics(measured),
            networks: Networks::new_with_refreshed_list(),
            measured_at: Instant::now(),
        }
    }

    /// Measures now; rates are averages since the last call.
    fn measure(&mut self) -> HostStats {
        self.system.refresh_cpu_usage();
        self.system.refresh_memory();
        self.networks.refresh(true);
        let seconds = self.measured_at.elapsed().as_secs_f64().max(1e-3);
        self.measured_at = Instant::now();
        let outside = || self.networks.iter().filter(|(name, _)| *name != "lo").map(|(_, net)| net);
        let per_second = |bytes: u64| bytes as f64 / seconds;
        let disk = statvfs(&self.run_dir).ok();
        let disk = disk.map(|disk| {
            [disk.f_bavail, disk.f_blocks].map(|blocks| blocks.saturating_mul(disk.f_frsize))
        });
        let [disk_free, disk_total] = disk.unwrap_or_default();
        HostStats {
            name: System::host_name().unwrap_or_default(),
            cpu: f64::from(self.system.global_cpu_usage() / 100.0).clamp(0.0, 1.0),
            cpus: u32::try_from(self.system.cpus().len()).unwrap_or(u32::MAX),
            memory_used: self.system.total_memory().saturating_sub(self.system.available_memory()),
            memory_total: self.system.total_memory(),
            disk_free,
            disk_total,
            received_per_second: per_second(outside().map(sysinfo::NetworkData::received).sum()),
            sent_per_second: per_second(outside().map(sysinfo::NetworkData::transmitted).sum()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_values_are_plausible() {
        let mut machine = HostMeter::new(std::env::temp_dir());
        machine.measure();
        let host = machine.measure();
        assert!(host.cpus > 0 && (0.0..=1.0).contains(&host.cpu), "{host:?}");
        assert!(host.memory_used > 0 && host.memory_used < host.memory_total, "{host:?}");
        assert!(host.disk_total > 0 && host.disk_free <= host.disk_total, "{host:?}");
        assert!(host.received_per_second >= 0.0 && host.sent_per_second >= 0.0, "{host:?}");
    }
}
