//! Receives GPU errors (Xid) from the driver.

use std::{collections::BTreeMap, thread, time::Duration};

use baton_job::{
    gpu::{
        GpuDevice,
        xid::{LOST, UNCORRECTABLE, Xid},
    },
    session::Event,
};
use nvml_wrapper::{
    EventSet, bitmasks::event::EventTypes, enums::event::XidError, error::NvmlError,
    struct_wrappers::event::EventData,
};
use tracing::{debug, warn};

use super::{super::AgentInput, Gpus, InputQueue};

/// Time after which a wait for events is interrupted to check whether the agent is still running.
const STOP_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Forwards errors until the agent's queue is closed.
pub(super) fn watch(gpus: &Gpus, queue: &InputQueue) {
    let whole = |device: &GpuDevice| (device.gpu, GpuDevice { is_part: false, ..device.clone() });
    // The driver reports errors for a whole GPU, not for its parts.
    let mut devices: BTreeMap<u32, GpuDevice> = gpus.visible.devices.iter().map(whole).collect();
    for (gpu, device) in &mut devices {
        device.uuid = gpus.installed.get(*gpu as usize).and_then(|gpu| gpu.uuid.clone());
    }
    let events = match register(gpus, &devices) {
        Ok(events) => events,
        Err(error) => {
            warn!("GPU errors (Xid) are not monitored: the driver reports: {error}");
            return;
        }
    };
    while !queue.is_closed() {
        match events.wait(STOP_CHECK_INTERVAL.as_millis() as u32) {
            Ok(event) => {
                let Some(xid) = xid_of(&event) else { continue };
                match device_of(&event, &devices, gpus) {
                    Some(device) => report(gpus, queue, device, xid),
                    None => warn!("an unknown GPU has an error (Xid {})", xid.0),
                }
            }
            Err(NvmlError::Timeout) => {}
            Err(error) => {
                debug!(%error, "cannot wait for GPU errors");
                if matches!(error, NvmlError::GpuLost) {
                    // Each lost GPU is reported once; it sends no further events.
                    let (lost, present): (BTreeMap<_, _>, _) = std::mem::take(&mut devices)
                        .into_iter()
                        .partition(|(_, device)| gpus.health(device).lost);
                    lost.values().for_each(|device| report(gpus, queue, device, LOST));
                    devices = present;
                }
                thread::sleep(STOP_CHECK_INTERVAL);
            }
        }
    }
}

fn register<'driver>(
    gpus: &'driver Gpus,
    devices: &BTreeMap<u32, GpuDevice>,
) -> Result<EventSet<'driver>, NvmlError> {
    let driver = gpus.driver.as_ref().ok_or(NvmlError::Uninitialized)?;
    let mut events = driver.create_event_set()?;
    for device in devices.values() {
        let handle = gpus.handle(device)?;
        let types = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
        let types = types & handle.supported_event_types().unwrap_or(EventTypes::empty());
        if types.is_empty() {
            // Some virtual GPUs do not support these events; the other GPUs are still monitored.
            warn!("errors of {device} (Xid) are not monitored: the driver does not support this");
            continue;
        }
        events = handle.register_events(types, events).map_err(|error| error.error)?;
    }
    Ok(events)
}

fn xid_of(event: &EventData<'_>) -> Option<Xid> {
    match event.event_data {
        Some(XidError::Value(number)) => Some(Xid(number)),
        Some(XidError::Unknown) => None,
        None => Some(UNCORRECTABLE),
    }
}

/// The GPU of an event. The UUID of a GPU that was just lost may be unreadable; then the first lost GPU is assumed.
fn device_of<'a>(
    event: &EventData<'_>,
    devices: &'a BTreeMap<u32, GpuDevice>,
    gpus: &Gpus,
) -> Option<&'a GpuDevice> {
    let uuid = event.device.uuid().ok();
    let named = devices.values().find(|device| uuid.is_some() && device.uuid == uuid);
    named.or_else(|| devices.values().find(|device| gpus.health(device).lost))
}

fn report(gpus: &Gpus, queue: &InputQueue, device: &GpuDevice, xid: Xid) {
    let gpu = device.to_string();
    warn!("{}", xid.describe(&gpu));
    let local_ranks = gpus.ranks_of(device.gpu);
    let _ = queue.send(AgentInput::Event(Event::GpuFailed { local_ranks, gpu, xid }));
}
