//! How this machine does: processor, memory, disk and network, and its GPUs if it has any.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use baton_job::{
    exit::{Failure, crash},
    message::{Host, Vitals},
    session::Event,
};
use sysinfo::{CpuRefreshKind, Disks, MemoryRefreshKind, Networks, RefreshKind, System};
use tokio::time::{MissedTickBehavior, interval};

use super::{Input, Queue, gpus::Gpus};

/// How often the coordinator hears that this agent lives, and how its machine does.
const EVERY: Duration = Duration::from_secs(1);

/// What was measured since it was last told.
type Measured = Arc<Mutex<Option<Vitals>>>;

/// Tells again and again that this agent lives, and how its machine does. It is measured by a thread of its own:
/// drivers and disks may take their time, and that says nothing of the agent.
pub(super) fn watch(run_dir: &Path, gpus: Arc<Gpus>, queue: Queue) -> Result<(), Failure> {
    let run_dir = run_dir.canonicalize().unwrap_or_else(|_| run_dir.to_owned());
    let measured = Measured::default();
    let newest = measured.clone();
    let measure = move || {
        let mut machine = Machine::new(run_dir);
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
}
