//! Which device a local rank has: `CUDA_VISIBLE_DEVICES` read as CUDA reads it.
//!
//! The variable is told in the CUDA C++ Programming Guide, appendix "CUDA Environment Variables"; what CUDA does with
//! parts of a GPU in the MIG User Guide, "Device Enumeration".

use super::Device;

/// The variable that says which devices a process sees.
pub const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// The variable that says in which order CUDA numbers GPUs.
pub const DEVICE_ORDER: &str = "CUDA_DEVICE_ORDER";
/// The order in which the driver, `nvidia-smi` and this module number them.
pub const PCI_ORDER: &str = "PCI_BUS_ID";

/// A GPU that the driver shows this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Installed {
    /// Its UUID; unknown if it has fallen off the bus.
    pub uuid: Option<String>,
    /// Its model.
    pub model: String,
    /// The UUIDs of the parts it is divided into, if it is (MIG).
    pub parts: Option<Vec<String>>,
}

/// The devices of a node's local ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visible {
    /// Of local rank 0, 1, …
    pub devices: Vec<Device>,
    /// The first name in the list that no GPU here has; CUDA leaves it out with all that follow.
    pub unknown: Option<String>,
}

impl Visible {
    /// What `list`, the value of [`VISIBLE_DEVICES`], means on a machine with these GPUs.
    ///
    /// CUDA shows a process one part of a GPU at most, and nothing beside it. Here every rank is a process of its
    /// own, so that all the parts that are named count; without a list, all parts there are, else all GPUs.
    #[must_use]
    pub fn new(list: Option<&str>, installed: &[Installed]) -> Self {
        let Some(list) = list else { return Self { devices: all(installed), unknown: None } };
        let mut devices = Vec::new();
        for name in list.split(',').map(str::trim) {
            match find(name, installed) {
                Some(device) => devices.push(device),
                // "", "-1" and words such as "NoDevFiles" (Slurm) end the list; they name nothing.
                None => {
                    let is_name = is_uuid(name) || name.parse::<u32>().is_ok();
                    return Self { devices, unknown: is_name.then(|| name.to_owned()) };
                }
            }
        }
        Self { devices, unknown: None }
    }

    /// What the process of a local rank must find in its environment beside what the agent's has; `order` is the
    /// agent's [`DEVICE_ORDER`].
    ///
    /// CUDA numbers the fastest GPU first, the driver by place on the bus. On a machine with several models the
    /// numbers would mean different GPUs to both, so ranks count as the driver does, unless the user says otherwise.
    #[must_use]
    pub fn environment(&self, local_rank: u32, order: Option<&str>) -> Vec<(&'static str, String)> {
        let order = order.is_none().then(|| (DEVICE_ORDER, PCI_ORDER.to_owned()));
        let own = self.devices.get(local_rank as usize).filter(|_| self.is_one_each());
        let own = own.and_then(|device| device.uuid.clone()).map(|uuid| (VISIBLE_DEVICES, uuid));
        order.into_iter().chain(own).collect()
    }

    /// Whether each rank must be shown its device alone, since CUDA would hide the others' from it.
    #[must_use]
    pub fn is_one_each(&self) -> bool {
        self.devices.iter().any(|device| device.is_part)
    }

    /// The number by which the process of a local rank knows its device.
    #[must_use]
    pub fn ordinal(&self, local_rank: u32) -> u32 {
        if self.is_one_each() { 0 } else { local_rank }
    }

    /// What a user should know: a name that means nothing, numbers that may mean other GPUs than they say.
    #[must_use]
    pub fn warnings(&self, order: Option<&str>, installed: &[Installed]) -> Vec<String> {
        let unknown = self.unknown.as_ref().map(|name| {
            format!(
                "{VISIBLE_DEVICES} names {name}, which is no GPU here: it is left out with all that follow; \
                 `nvidia-smi -L` shows what is here"
            )
        });
        let mixed = installed.windows(2).any(|two| two[0].model != two[1].model);
        let fastest_first = order.is_some_and(|order| order != PCI_ORDER);
        let order = (mixed && fastest_first).then(|| {
            format!(
                "{DEVICE_ORDER} is not {PCI_ORDER} and the GPUs are of several models: what is told of a GPU may be \
                 another rank's; unset {DEVICE_ORDER}"
            )
        });
        unknown.into_iter().chain(order).collect()
    }
}

fn all(installed: &[Installed]) -> Vec<Device> {
    let parts: Vec<_> = numbered(installed).flat_map(|(gpu, it)| parts_of(gpu, it)).collect();
    if !parts.is_empty() {
        return parts;
    }
    numbered(installed).filter_map(|(gpu, it)| whole(gpu, it)).collect()
}

fn find(name: &str, installed: &[Installed]) -> Option<Device> {
    if let Ok(gpu) = name.parse::<u32>() {
        return numbered(installed).find(|(number, _)| *number == gpu).and_then(first_of);
    }
    if let Some(old) = name.strip_prefix("MIG-GPU-") {
        // `MIG-GPU-<uuid of the GPU>/<instance>/<compute instance>`: the driver knows it by this name too.
        let uuid = format!("GPU-{}", old.split('/').next()?);
        let (gpu, _) =
            only(numbered(installed).filter(|(_, it)| is_short_for(&uuid, it.uuid.as_deref())))?;
        return Some(Device { gpu, uuid: Some(name.to_owned()), is_part: true });
    }
    if name.starts_with("MIG-") {
        let parts = numbered(installed).flat_map(|(gpu, it)| parts_of(gpu, it));
        return only(parts.filter(|part| is_short_for(name, part.uuid.as_deref())));
    }
    let named =
        |(_, it): &(u32, &Installed)| is_uuid(name) && is_short_for(name, it.uuid.as_deref());
    only(numbered(installed).filter(named)).and_then(first_of)
}

/// The GPU, or the first part of one that is divided, as CUDA has it.
fn first_of((gpu, installed): (u32, &Installed)) -> Option<Device> {
    parts_of(gpu, installed).into_iter().next().or_else(|| whole(gpu, installed))
}

/// None of a GPU that is to be divided: CUDA shows nothing but its parts.
fn whole(gpu: u32, installed: &Installed) -> Option<Device> {
    let device = Device { gpu, uuid: installed.uuid.clone(), is_part: false };
    installed.parts.is_none().then_some(device)
}

fn parts_of(gpu: u32, installed: &Installed) -> Vec<Device> {
    let uuids = installed.parts.iter().flatten();
    uuids.map(|uuid| Device { gpu, uuid: Some(uuid.clone()), is_part: true }).collect()
}

fn numbered(installed: &[Installed]) -> impl Iterator<Item = (u32, &Installed)> {
    (0..).zip(installed)
}

fn is_uuid(name: &str) -> bool {
    name.starts_with("GPU-") || name.starts_with("MIG-")
}

/// CUDA takes as much of a UUID as is needed to tell it from the others.
fn is_short_for(name: &str, uuid: Option<&str>) -> bool {
    uuid.is_some_and(|uuid| uuid.starts_with(name))
}

/// What there is one of.
fn only<T>(mut found: impl Iterator<Item = T>) -> Option<T> {
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(uuid: &str) -> Installed {
        Installed { uuid: Some(uuid.to_owned()), model: "H100".to_owned(), parts: None }
    }

    fn divided(uuid: &str, parts: &[&str]) -> Installed {
        let parts = parts.iter().map(|part| (*part).to_owned()).collect();
        Installed { parts: Some(parts), ..gpu(uuid) }
    }

    /// Four whole GPUs, of which two have UUIDs that begin alike.
    fn four() -> Vec<Installed> {
        ["GPU-8a1", "GPU-8b2", "GPU-c3", "GPU-d4"].map(gpu).to_vec()
    }

    /// Two GPUs of which the first is divided.
    fn parted() -> Vec<Installed> {
        vec![divided("GPU-e5", &["MIG-11", "MIG-12"]), gpu("GPU-f6")]
    }

    /// Each device's GPU, and its UUID if it is a part.
    fn seen(list: Option<&str>, installed: &[Installed]) -> Vec<(u32, Option<String>)> {
        let devices = Visible::new(list, installed).devices;
        devices.into_iter().map(|it| (it.gpu, it.uuid.filter(|_| it.is_part))).collect()
    }

    fn wholes(numbers: &[u32]) -> Vec<(u32, Option<String>)> {
        numbers.iter().map(|number| (*number, None)).collect()
    }

    fn part(gpu: u32, uuid: &str) -> (u32, Option<String>) {
        (gpu, Some(uuid.to_owned()))
    }

    #[test]
    fn ranks_have_the_devices_that_cuda_sees() {
        assert_eq!(seen(None, &four()), wholes(&[0, 1, 2, 3]));
        assert_eq!(seen(Some("3, 1"), &four()), wholes(&[3, 1]));
        assert_eq!(seen(Some("GPU-c3,0"), &four()), wholes(&[2, 0]));
        assert_eq!(seen(None, &[]), []);
    }

    #[test]
    fn what_follows_a_name_that_is_no_device_is_not_seen() {
        for nothing in ["", "-1", "NoDevFiles", "-1,0"] {
            assert_eq!(Visible::new(Some(nothing), &four()), Visible::default(), "{nothing}");
        }
        let visible = Visible::new(Some("2,7,0"), &four());
        assert_eq!((visible.devices.len(), visible.unknown.as_deref()), (1, Some("7")));
        let told = visible.warnings(None, &four());
        assert!(told.len() == 1 && told[0].contains("names 7"), "{told:?}");
    }

    #[test]
    fn a_uuid_may_be_cut_short_as_long_as_one_gpu_has_it() {
        assert_eq!(seen(Some("GPU-8b,GPU-d"), &four()), wholes(&[1, 3]));
        let both = Visible::new(Some("GPU-8"), &four());
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
    fn a_divided_gpu_stands_for_its_first_part() {
        assert_eq!(seen(Some("0"), &parted()), [part(0, "MIG-11")]);
        assert_eq!(seen(Some("GPU-e5"), &parted()), [part(0, "MIG-11")]);
        assert_eq!(seen(None, &[divided("GPU-e5", &[]), gpu("GPU-f6")]), wholes(&[1]));
    }

    #[test]
    fn a_gpu_that_is_lost_keeps_its_number() {
        let mut gpus = four();
        gpus[1].uuid = None;
        assert_eq!(seen(Some("1,2"), &gpus), wholes(&[1, 2]));
    }

    #[test]
    fn ranks_count_gpus_as_the_driver_does_unless_the_user_says_otherwise() {
        let visible = Visible::new(None, &four());
        assert_eq!(visible.environment(1, None), [(DEVICE_ORDER, PCI_ORDER.to_owned())]);
        assert_eq!(visible.environment(1, Some("FASTEST_FIRST")), []);
        assert_eq!(visible.ordinal(1), 1);
    }

    #[test]
    fn a_rank_on_a_part_is_shown_that_part_alone() {
        let visible = Visible::new(Some("MIG-11,MIG-12,1"), &parted());
        let own = |rank| visible.environment(rank, Some(PCI_ORDER));
        assert_eq!(own(1), [(VISIBLE_DEVICES, "MIG-12".to_owned())]);
        assert_eq!(own(2), [(VISIBLE_DEVICES, "GPU-f6".to_owned())]);
        assert_eq!([0, 1, 2].map(|rank| visible.ordinal(rank)), [0, 0, 0]);
    }

    #[test]
    fn another_order_is_warned_of_where_it_matters() {
        let mut gpus = four();
        let warned =
            |gpus: &[Installed], order| !Visible::new(None, gpus).warnings(order, gpus).is_empty();
        assert!(!warned(&gpus, Some("FASTEST_FIRST")));
        gpus[3].model = "A10".to_owned();
        assert!(warned(&gpus, Some("FASTEST_FIRST")));
        assert!(!warned(&gpus, Some(PCI_ORDER)) && !warned(&gpus, None));
    }
}
