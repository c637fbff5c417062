//! Waits for the errors that the driver tells of.

use std::{collections::BTreeMap, thread, time::Duration};

use baton_job::{
    gpu::{
        Device,
        xid::{LOST, UNCORRECTABLE, Xid},
    },
    session::Event,
};
use nvml_wrapper::{
    EventSet, bitmasks::event::EventTypes, enums::event::XidError, error::NvmlError,
    struct_wrappers::event::EventData,
};
use tracing::{debug, warn};

use super::{super::Input, Gpus, Queue};

/// How long to wait before looking whether anybody is there to be told.
const WAIT: Duration = Duration::from_secs(1);

/// Until nobody is there to be told.
pub(super) fn watch(gpus: &Gpus, queue: &Queue) {
    let whole = |device: &Device| (device.gpu, Device { is_part: false, ..device.clone() });
    // Parts have none of their own.
    let mut devices: BTreeMap<u32, Device> = gpus.visible.devices.iter().map(whole).collect();
    for (gpu, device) in &mut devices {
        device.uuid = gpus.installed.get(*gpu as usize).and_then(|it| it.uuid.clone());
    }
    let events = match register(gpus, &devices) {
        Ok(events) => events,
        Err(error) => {
            warn!("errors of GPUs (Xid) are not watched, as the driver says: {error}");
            return;
        }
    };
    while !queue.is_closed() {
        match events.wait(WAIT.as_millis() as u32) {
            Ok(event) => {
                let Some(xid) = number(&event) else { continue };
                match of(&event, &devices, gpus) {
                    Some(device) => tell(gpus, queue, device, xid),
                    None => warn!("a GPU that cannot be named has an error (Xid {})", xid.0),
                }
            }
            Err(NvmlError::Timeout) => {}
            Err(error) => {
                debug!(%error, "the driver tells of no errors");
                if matches!(error, NvmlError::GpuLost) {
                    // Each is told once: nothing more comes of it.
                    let (lost, well): (BTreeMap<_, _>, _) = std::mem::take(&mut devices)
                        .into_iter()
                        .partition(|(_, device)| gpus.health(device).lost);
                    lost.values().for_each(|device| tell(gpus, queue, device, LOST));
                    devices = well;
                }
                thread::sleep(WAIT);
            }
        }
    }
}

fn register<'driver>(
    gpus: &'driver Gpus,
    devices: &BTreeMap<u32, Device>,
) -> Result<EventSet<'driver>, NvmlError> {
    let driver = gpus.driver.as_ref().ok_or(NvmlError::Uninitialized)?;
    let mut events = driver.create_event_set()?;
    for device in devices.values() {
        let handle = gpus.handle(device)?;
        let wanted = EventTypes::CRITICAL_XID_ERROR | EventTypes::DOUBLE_BIT_ECC_ERROR;
        let wanted = wanted & handle.supported_event_types().unwrap_or(EventTypes::empty());
        if wanted.is_empty() {
            // As on some virtual GPUs; the others are watched all the same.
            warn!("errors of {device} (Xid) are not watched: its driver tells of none");
            continue;
        }
        events = handle.register_events(wanted, events).map_err(|error| error.error)?;
    }
    Ok(events)
}

fn number(event: &EventData<'_>) -> Option<Xid> {
    match event.event_data {
        Some(XidError::Value(number)) => Some(Xid(number)),
        Some(XidError::Unknown) => None,
        None => Some(UNCORRECTABLE),
    }
}

/// The GPU of an event; one that has just been lost may not tell its UUID any more.
fn of<'a>(
    event: &EventData<'_>,
    devices: &'a BTreeMap<u32, Device>,
    gpus: &Gpus,
) -> Option<&'a Device> {
    let uuid = event.device.uuid().ok();
    let named = devices.values().find(|device| uuid.is_some() && device.uuid == uuid);
    named.or_else(|| devices.values().find(|device| gpus.health(device).lost))
}

fn tell(gpus: &Gpus, queue: &Queue, device: &Device, xid: Xid) {
    let gpu = device.to_string();
    warn!("{}", xid.describe(&gpu));
    let local_ranks = gpus.ranks_of(device.gpu);
    let _ = queue.send(Input::Event(Event::GpuFailed { local_ranks, gpu, xid }));
}
