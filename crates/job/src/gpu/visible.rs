//! Which device each local rank uses: interprets `CUDA_VISIBLE_DEVICES` like CUDA does.
//!
//! Sources: the CUDA C++ Programming Guide, appendix "CUDA Environment Variables"; for parts of a GPU the MIG User
//! Guide, "Device Enumeration".

use super::GpuDevice;

/// Environment variable that lists the devices a process sees.
pub const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// Environment variable for the order in which CUDA numbers GPUs.
pub const DEVICE_ORDER: &str = "CUDA_DEVICE_ORDER";
/// Value of [`DEVICE_ORDER`] for the order that the driver, `nvidia-smi` and this module use.
pub const PCI_ORDER: &str = "PCI_BUS_ID";

/// A GPU of this machine, as the driver reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InstalledGpu {
    /// UUID; unknown if the GPU has fallen off the bus.
    pub uuid: Option<String>,
    /// Name of the model.
    pub model: String,
    /// UUIDs of its parts if it is divided (MIG).
    pub parts: Option<Vec<String>>,
}

/// The devices of a node's local ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VisibleDevices {
    /// Devices of local rank 0, 1, …
    pub devices: Vec<GpuDevice>,
    /// First name in the list that matches no GPU here; CUDA ignores it and all names after it.
    pub unknown: Option<String>,
}

impl VisibleDevices {
    /// Devices that `list`, the value of [`VISIBLE_DEVICES`], selects on a machine with these GPUs.
    ///
    /// CUDA shows a process at most one part of a GPU, and then no other device. Here every rank is a separate process,
    /// so all listed parts are used. Without a list, all parts are used, or all GPUs if there are no parts.
    #[must_use]
    pub fn new(list: Option<&str>, installed: &[InstalledGpu]) -> Self {
        let Some(list) = list else { return Self { devices: all(installed), unknown: None } };
        let mut devices = Vec::new();
        for name in list.split(',').map(str::trim) {
            match find(name, installed) {
                Some(device) => devices.push(device),
                // "", "-1" and words such as "NoDevFiles" (Slurm) end the list; they are not names.
                None => {
                    let is_name = is_uuid(name) || name.parse::<u32>().is_ok();
                    return Self { devices, unknown: is_name.then(|| name.to_owned()) };
                }
            }
        }
        Self { devices, unknown: None }
    }

    /// Variables to add to the environment of a local rank's process; `order` is the agent's [`DEVICE_ORDER`].
    ///
    /// By default CUDA numbers the fastest GPU first, but the driver numbers them by position on the bus. On a machine
    /// with several models these numbers differ, so ranks use the driver's order unless the user has set another.
    #[must_use]
    pub fn environment(&self, local_rank: u32, order: Option<&str>) -> Vec<(&'static str, String)> {
        let order = order.is_none().then(|| (DEVICE_ORDER, PCI_ORDER.to_owned()));
        let own = self.devices.get(local_rank as usize).filter(|_| self.sees_one_device());
        let own = own.and_then(|device| device.uuid.clone()).map(|uuid| (VISIBLE_DEVICES, uuid));
        order.into_iter().chain(own).collect()
    }

    /// Whether each rank's process is shown only its own device, as parts of GPUs require.
    #[must_use]
    pub fn sees_one_device(&self) -> bool {
        self.devices.iter().any(|device| device.is_part)
    }

    /// CUDA's number of the device in the process of a local rank.
    #[must_use]
    pub fn ordinal(&self, local_rank: u32) -> u32 {
        if self.sees_one_device() { 0 } else { local_rank }
    }

    /// Warnings for the user: an unknown name in the list, and an order in which numbers mean other GPUs than the
    /// driver's.
    #[must_use]
    pub fn warnings(&self, order: Option<&str>, installed: &[InstalledGpu]) -> Vec<String> {
        let unknown = self.unknown.as_ref().map(|name| {
            format!(
                "{VISIBLE_DEVICES} names {name}, but this machine has no such GPU: it and all names after it are ignored; \
                 `nvidia-smi -L` lists the GPUs"
            )
        });
        let mixed = installed.windows(2).any(|two| two[0].model != two[1].model);
        let fastest_first = order.is_some_and(|order| order != PCI_ORDER);
        let order = (mixed && fastest_first).then(|| {
            format!(
                "{DEVICE_ORDER} is not {PCI_ORDER} and this machine has several models of GPUs: statistics and errors \
                 may be shown for the wrong rank's GPU; unset {DEVICE_ORDER}"
            )
        });
        unknown.into_iter().chain(order).collect()
    }
}

fn all(installed: &[InstalledGpu]) -> Vec<GpuDevice> {
    let parts: Vec<_> = numbered(installed).flat_map(|(gpu, it)| parts_of(gpu, it)).collect();
    if !parts.is_empty() {
        return parts;
    }
    numbered(installed).filter_map(|(gpu, it)| whole(gpu, it)).collect()
}

fn find(name: &str, installed: &[InstalledGpu]) -> Option<GpuDevice> {
    if let Ok(gpu) = name.parse::<u32>() {
        return numbered(installed).find(|(number, _)| *number == gpu).and_then(first_of);
    }
    if let Some(old) = name.strip_prefix("MIG-GPU-") {
        // `MIG-GPU-<uuid of the GPU>/<instance>/<compute instance>`: the driver accepts this name too.
        let uuid = format!("GPU-{}", old.split('/').next()?);
        let (gpu, _) =
            only(numbered(installed).filter(|(_, it)| is_short_for(&uuid, it.uuid.as_deref())))?;
        return Some(GpuDevice { gpu, uuid: Some(name.to_owned()), is_part: true });
    }
    if name.starts_with("MIG-") {
        let parts = numbered(installed).flat_map(|(gpu, it)| parts_of(gpu, it));
        return only(parts.filter(|part| is_short_for(name, part.uuid.as_deref())));
    }
    let named =
        |(_, it): &(u32, &InstalledGpu)| is_uuid(name) && is_short_for(name, it.uuid.as_deref());
    only(numbered(installed).filter(named)).and_then(first_of)
}

/// The GPU, or its first part if it is divided, like CUDA.
fn first_of((gpu, installed): (u32, &InstalledGpu)) -> Option<GpuDevice> {
    parts_of(gpu, installed).into_iter().next().or_else(|| whole(gpu, installed))
}

/// The whole GPU; `None` if it is divided, because CUDA then shows only the parts.
fn whole(gpu: u32, installed: &InstalledGpu) -> Option<GpuDevice> {
    let device = GpuDevice { gpu, uuid: installed.uuid.clone(), is_part: false };
    installed.parts.is_none().then_some(device)
}

fn parts_of(gpu: u32, installed: &InstalledGpu) -> Vec<GpuDevice> {
    let uuids = installed.parts.iter().flatten();
    uuids.map(|uuid| GpuDevice { gpu, uuid: Some(uuid.clone()), is_part: true }).collect()
}

fn numbered(installed: &[InstalledGpu]) -> impl Iterator<Item = (u32, &InstalledGpu)> {
    (0..).zip(installed)
}

fn is_uuid(name: &str) -> bool {
    name.starts_with("GPU-") || name.starts_with("MIG-")
}

/// Whether `name` is the UUID or its beginning, which CUDA accepts if it is unique.
fn is_short_for(name: &str, uuid: Option<&str>) -> bool {
    uuid.is_some_and(|uuid| uuid.starts_with(name))
}

/// The only item; `None` if there are none or several.
fn only<T>(mut found: impl Iterator<Item = T>) -> Option<T> {
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str) -> InstalledGpu {
        InstalledGpu { uuid: Some(uuid.to_owned()), model: "H100".to_owned(), parts: None }
    }

    fn divided(uuid: &str, parts: &[&str]) -> InstalledGpu {
        let parts = parts.iter().map(|part| (*part).to_owned()).collect();
        InstalledGpu { parts: Some(parts), ..gpu(uuid) }
    }

    /// Four undivided GPUs; the UUIDs of two begin alike.
    fn four() -> Vec<InstalledGpu> {
        ["GPU-8a1", "GPU-8b2", "GPU-c3", "GPU-d4"].map(gpu).to_vec()
    }

    /// Two GPUs; the first is divided.
    fn parted() -> Vec<InstalledGpu> {
        vec![divided("GPU-e5", &["MIG-11", "MIG-12"]), gpu("GPU-f6")]
    }

    /// Each device's GPU, and its UUID if it is a part.
    fn seen(list: Option<&str>, installed: &[InstalledGpu]) -> Vec<(u32, Option<String>)> {
        let devices = VisibleDevices::new(list, installed).devices;
        devices.into_iter().map(|it| (it.gpu, it.uuid.filter(|_| it.is_part))).collect()
    }

    fn wholes(numbers: &[u32]) -> Vec<(u32, Option<String>)> {
        numbers.iter().map(|number| (*number, None)).collect()
    }

    fn part(gpu: u32, uuid: &str) -> (u32, Option<String>) {
        (gpu, Some(uuid.to_owned()))
    }

    #[test]
    fn ranks_use_the_devices_that_cuda_sees() {
        assert_eq!(seen(None, &four()), wholes(&[0, 1, 2, 3]));
        assert_eq!(seen(Some("3, 1"), &four()), wholes(&[3, 1]));
        assert_eq!(seen(Some("GPU-c3,0"), &four()), wholes(&[2, 0]));
        assert_eq!(seen(None, &[]), []);
    }

    #[test]
    fn names_after_an_unknown_name_are_ignored() {
        for nothing in ["", "-1", "NoDevFiles", "-1,0"] {
            assert_eq!(
                VisibleDevices::new(Some(nothing), &four()),
                VisibleDevices::default(),
                "{nothing}"
            );
        }
        let visible = VisibleDevices::new(Some("2,7,0"), &four());
        assert_eq!((visible.devices.len(), visible.unknown.as_deref()), (1, Some("7")));
        let warnings = visible.warnings(None, &four());
        assert!(warnings.len() == 1 && warnings[0].contains("names 7"), "{warnings:?}");
    }

    #[test]
    fn uuid_may_be_shortened_if_it_is_unique() {
        assert_eq!(seen(Some("GPU-8b,GPU-d"), &four()), wholes(&[1, 3]));
        let both = VisibleDevices::new(Some("GPU-8"), &four());
        assert_eq!((both.devices.len(), both.unknown.as_deref()), (0, Some("GPU-8")));
    }

    #[test]
    fn every_part_of_a_gpu_counts_as_a_device() {
        assert_eq!(seen(None, &parted()), [part(0, "MIG-11"), part(0, "MIG-12")]);
        assert_eq!(seen(Some("MIG-12,MIG-11"), &parted()), [part(0, "MIG-12"), part(0, "MIG-11")]);
        let old = "MIG-GPU-e5/1/0";
        assert_eq!(seen(Some(old), &parted()), [part(0, old)]);
    }

    #[test]
    fn divided_gpu_means_its_first_part() {
        assert_eq!(seen(Some("0"), &parted()), [part(0, "MIG-11")]);
        assert_eq!(seen(Some("GPU-e5"), &parted()), [part(0, "MIG-11")]);
        assert_eq!(seen(None, &[divided("GPU-e5", &[]), gpu("GPU-f6")]), wholes(&[1]));
    }

    #[test]
    fn lost_gpu_keeps_its_number() {
        let mut gpus = four();
        gpus[1].uuid = None;
        assert_eq!(seen(Some("1,2"), &gpus), wholes(&[1, 2]));
    }

    #[test]
    fn ranks_use_the_drivers_order_unless_the_user_has_set_another() {
        let visible = VisibleDevices::new(None, &four());
        assert_eq!(visible.environment(1, None), [(DEVICE_ORDER, PCI_ORDER.to_owned())]);
        assert_eq!(visible.environment(1, Some("FASTEST_FIRST")), []);
        assert_eq!(visible.ordinal(1), 1);
    }

    #[test]
    fn rank_on_a_part_sees_only_that_part() {
        let visible = VisibleDevices::new(Some("MIG-11,MIG-12,1"), &parted());
        let own = |rank| visible.environment(rank, Some(PCI_ORDER));
        assert_eq!(own(1), [(VISIBLE_DEVICES, "MIG-12".to_owned())]);
        assert_eq!(own(2), [(VISIBLE_DEVICES, "GPU-f6".to_owned())]);
        assert_eq!([0, 1, 2].map(|rank| visible.ordinal(rank)), [0, 0, 0]);
    }

    #[test]
    fn another_order_is_warned_about_on_mixed_models() {
        let mut gpus = four();
        let warned = |gpus: &[InstalledGpu], order| {
            !VisibleDevices::new(None, gpus).warnings(order, gpus).is_empty()
        };
        assert!(!warned(&gpus, Some("FASTEST_FIRST")));
        gpus[3].model = "A10".to_owned();
        assert!(warned(&gpus, Some("FASTEST_FIRST")));
        assert!(!warned(&gpus, Some(PCI_ORDER)) && !warned(&gpus, None));
    }
}
