//! A configuration of ffcv-imagenet as a recipe. Pure.
//!
//! Sections, names and defaults are those of its `train_imagenet.py` (github.com/libffcv/ffcv-imagenet at 4dd291a).

use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use serde_json::{Map, Value};
use toml::{Table, toml};

/// A recipe and what a user must know about it.
pub(super) struct FfcvRecipe {
    pub(super) recipe: Table,
    pub(super) notes: Vec<String>,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct FfcvModel {
    arch: String,
    #[serde(deserialize_with = "flag")]
    pretrained: bool,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Resolution {
    min_res: u32,
    max_res: u32,
    end_ramp: u32,
    start_ramp: u32,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct FfcvData {
    train_dataset: Option<String>,
    val_dataset: Option<String>,
    num_workers: Option<u32>,
    #[serde(deserialize_with = "flag")]
    in_memory: bool,
    /// In published files, although the script has no such parameter.
    #[serde(rename = "gpu")]
    _gpu: Option<Value>,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Lr {
    step_ratio: f64,
    step_length: u32,
    lr_schedule_type: String,
    lr: f64,
    lr_peak_epoch: u32,
}

/// Not used: metrics are in the run folder.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Logging {
    #[serde(rename = "folder")]
    _folder: Option<Value>,
    #[serde(rename = "log_level")]
    _log_level: Option<Value>,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Validation {
    batch_size: u32,
    resolution: u32,
    #[serde(deserialize_with = "flag")]
    lr_tta: bool,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Training {
    #[serde(deserialize_with = "flag")]
    eval_only: bool,
    batch_size: u32,
    optimizer: String,
    momentum: f64,
    weight_decay: f64,
    epochs: u32,
    label_smoothing: f64,
    #[serde(deserialize_with = "flag")]
    distributed: bool,
    #[serde(deserialize_with = "flag")]
    use_blurpool: bool,
    /// In published files, although the script has no such parameter.
    #[serde(rename = "bn_wd")]
    _bn_wd: Option<Value>,
}

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Dist {
    world_size: u32,
    #[serde(rename = "address")]
    _address: Option<Value>,
    #[serde(rename = "port")]
    _port: Option<Value>,
}

impl Default for FfcvModel {
    fn default() -> Self {
        Self { arch: "resnet18".to_owned(), pretrained: false }
    }
}

impl Default for Resolution {
    fn default() -> Self {
        Self { min_res: 160, max_res: 160, end_ramp: 0, start_ramp: 0 }
    }
}

impl Default for Lr {
    fn default() -> Self {
        let lr_schedule_type = "cyclic".to_owned();
        Self { step_ratio: 0.1, step_length: 30, lr_schedule_type, lr: 0.5, lr_peak_epoch: 2 }
    }
}

impl Default for Validation {
    fn default() -> Self {
        Self { batch_size: 512, resolution: 224, lr_tta: true }
    }
}

impl Default for Training {
    fn default() -> Self {
        Self {
            eval_only: false,
            batch_size: 512,
            optimizer: "sgd".to_owned(),
            momentum: 0.9,
            weight_decay: 4e-5,
            epochs: 30,
            label_smoothing: 0.1,
            distributed: false,
            use_blurpool: false,
            _bn_wd: None,
        }
    }
}

impl Default for Dist {
    fn default() -> Self {
        Self { world_size: 1, _address: None, _port: None }
    }
}

/// Switches are 0, 1, or a bool.
fn flag<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Bool(is_on) => Ok(is_on),
        Value::Number(number) if number.as_u64().is_some_and(|number| number < 2) => {
            Ok(number.as_u64() == Some(1))
        }
        other => Err(serde::de::Error::custom(format!("{other} is neither 0 nor 1"))),
    }
}

/// Adds arguments of the script, each `--section.key=value`, which go before the file's values.
///
/// # Errors
/// An argument has another form.
pub(super) fn apply(config: &mut Map<String, Value>, arguments: &[String]) -> Result<(), String> {
    for argument in arguments {
        let parts = argument.strip_prefix("--").and_then(|rest| rest.split_once('='));
        let Some(((section, key), value)) =
            parts.and_then(|(key, value)| Some((key.split_once('.')?, value)))
        else {
            return Err(format!("{argument}: give --SECTION.KEY=VALUE, such as --lr.lr=1.7"));
        };
        let value = serde_saphyr::from_str(value).unwrap_or_else(|_| value.into());
        let section = config.entry(section).or_insert_with(|| Map::new().into());
        let fields = section.as_object_mut().ok_or("a section of the file has no keys")?;
        fields.insert(key.to_owned(), value);
    }
    Ok(())
}

/// The recipe for a configuration.
///
/// # Errors
/// What a recipe cannot say, or the script does not know.
pub(super) fn import(name: &str, mut config: Map<String, Value>) -> Result<FfcvRecipe, String> {
    let model: FfcvModel = section(&mut config, "model")?;
    let resolution: Resolution = section(&mut config, "resolution")?;
    let data: FfcvData = section(&mut config, "data")?;
    let lr: Lr = section(&mut config, "lr")?;
    let _: Logging = section(&mut config, "logging")?;
    let validation: Validation = section(&mut config, "validation")?;
    let training: Training = section(&mut config, "training")?;
    let dist: Dist = section(&mut config, "dist")?;
    if let Some(unknown) = config.keys().next() {
        return Err(format!("{unknown}: ffcv-imagenet has no such section"));
    }
    if training.eval_only {
        return Err("training.eval_only: `baton-worker eval` evaluates weights".to_owned());
    }
    if training.optimizer != "sgd" {
        return Err(format!(
            "training.optimizer = {}: ffcv-imagenet has sgd only",
            training.optimizer
        ));
    }

    let ranks = if training.distributed { dist.world_size } else { 1 };
    let global_batch = training.batch_size.saturating_mul(ranks);
    let epochs = f64::from(training.epochs);
    let mut recipe = toml! {
        [model]
        num_classes = 1000
        zero_init_gamma = false

        [data]
        resize = "area"

        [optimizer]
        kind = "sgd"

        [schedule]
        kind = "piecewise_linear"

        [precision]
        compute = "fp16"
        determinism = "fast"

        [cluster]
        device = "cuda"
        node_grace_seconds = 30.0
        rendezvous_seconds = 300.0
    };
    recipe.insert("name".to_owned(), name.into());
    let mut set = |table: &str, key: &str, value: toml::Value| {
        let table = recipe.entry(table).or_insert_with(|| Table::new().into());
        if let Some(table) = table.as_table_mut() {
            table.insert(key.to_owned(), value);
        }
    };
    let mut notes = Vec::new();

    if !matches!(
        model.arch.as_str(),
        "resnet18" | "resnet34" | "resnet50" | "resnet101" | "resnet152"
    ) {
        return Err(format!(
            "model.arch = {}: this network is not built in; export it with `baton.export` and set model.arch = \
             \"program\" (docs/any-model.md)",
            model.arch
        ));
    }
    set("model", "arch", model.arch.into());
    set("model", "blur_pool", training.use_blurpool.into());
    if model.pretrained {
        notes.push(
            "model.pretrained: set it to a file with torchvision's weights; this recipe begins with random ones"
                .to_owned(),
        );
    }

    for (key, file) in [("train", data.train_dataset), ("val", data.val_dataset)] {
        if file.is_none() {
            notes.push(format!(
                "data.{key}: set it to your .beton file; the configuration names none"
            ));
        }
        set("data", key, file.unwrap_or_else(|| format!("{key}.beton")).into());
    }
    // Without several processes, the script shuffles blocks.
    let order = if training.distributed { "random" } else { "quasi_random" };
    set("data", "order", order.into());
    if let Some(threads) = data.num_workers {
        set("data", "decode_threads", i64::from(threads).into());
    }
    if data.in_memory && !training.distributed {
        notes.push("data.in_memory: the system keeps a file in memory as it can; `data.order = \"random\"` suits one that fits".to_owned());
    }

    set("train", "epochs", i64::from(training.epochs).into());
    set("train", "global_batch", i64::from(global_batch).into());
    set("train", "virtual_ranks", i64::from(ranks).into());
    set("train", "resolution", i64::from(resolution.min_res).into());
    let phases = phases(&resolution, training.epochs, global_batch)?;
    if !phases.is_empty() {
        set("train", "phases", phases.into());
    }
    set("optimizer", "momentum", training.momentum.into());
    set("optimizer", "weight_decay", training.weight_decay.into());
    set("loss", "label_smoothing", training.label_smoothing.into());
    notes.push(
        "optimizer.weight_decay: the script also decays the classifier's bias and the BatchNorms of the shortcuts; \
         optimizer.decay_norm_and_bias is one switch for all of them, and off"
            .to_owned(),
    );

    let points = match lr.lr_schedule_type.as_str() {
        "cyclic" => vec![[0.0, 1e-4 * lr.lr], [f64::from(lr.lr_peak_epoch), lr.lr], [epochs, 0.0]],
        "step" => steps(&lr, training.epochs)?,
        other => return Err(format!("lr.lr_schedule_type = {other}: it is cyclic or step")),
    };
    let points = points.into_iter().map(|[epoch, rate]| vec![epoch, rounded(rate)]);
    set("schedule", "points", points.collect::<Vec<_>>().into());

    set("evaluation", "resolution", i64::from(validation.resolution).into());
    set("evaluation", "batch", i64::from(validation.batch_size).into());
    set("evaluation", "flip", validation.lr_tta.into());
    set("cluster", "min_ranks", i64::from(ranks).into());
    set("cluster", "max_ranks", i64::from(ranks).into());
    Ok(FfcvRecipe { recipe, notes })
}

/// A section with the script's defaults.
fn section<T: DeserializeOwned>(config: &mut Map<String, Value>, name: &str) -> Result<T, String> {
    let values = config.remove(name).filter(|values| !values.is_null());
    let values = values.unwrap_or_else(|| Map::new().into());
    serde_json::from_value(values).map_err(|error| format!("{name}: {error}"))
}

fn phases(resolution: &Resolution, epochs: u32, global_batch: u32) -> Result<Vec<Table>, String> {
    let &Resolution { min_res, max_res, start_ramp, end_ramp } = resolution;
    if max_res < min_res || end_ramp < start_ramp {
        return Err(
            "resolution: max_res is below min_res, or end_ramp before start_ramp".to_owned()
        );
    }
    if max_res == min_res || start_ramp >= epochs {
        return Ok(Vec::new());
    }
    // The script asks for the end of the ramp after its beginning.
    let from_epoch = start_ramp + u32::from(start_ramp == end_ramp);
    let mut phase = Table::new();
    for (key, value) in [
        ("from_epoch", from_epoch),
        ("resolution", max_res),
        ("global_batch", global_batch),
        ("ramp_epochs", end_ramp - start_ramp),
    ] {
        phase.insert(key.to_owned(), i64::from(value).into());
    }
    Ok(vec![phase])
}

/// A rate that falls in steps. Within an epoch the script goes linearly to the rate of the next one, so each step takes
/// the epoch before it, and the last epoch ends at 0.
fn steps(lr: &Lr, epochs: u32) -> Result<Vec<[f64; 2]>, String> {
    if lr.step_length == 0 {
        return Err("lr.step_length = 0: must be at least 1".to_owned());
    }
    let mut rate = lr.lr;
    let mut points = vec![[0.0, rate]];
    for epoch in (lr.step_length..epochs).step_by(lr.step_length as usize) {
        points.push([f64::from(epoch - 1), rate]);
        rate *= lr.step_ratio;
        points.push([f64::from(epoch), rate]);
    }
    points.push([f64::from(epochs.saturating_sub(1)), rate]);
    points.push([f64::from(epochs), 0.0]);
    points.dedup_by_key(|[epoch, _]| *epoch);
    Ok(points)
}

/// Without the last digits, which products of decimal numbers have: 0.00017, not 0.00017000000000000001.
fn rounded(rate: f64) -> f64 {
    format!("{rate:.12e}").parse().unwrap_or(rate)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use baton_recipe::JobSpec;

    use super::*;
    use crate::commands::recipe::read;

    /// The published configurations of ResNet-50, which differ in these numbers only.
    fn published(epochs: u32, start_ramp: u32, end_ramp: u32) -> String {
        format!(
            "data: {{in_memory: 1, num_workers: 12}}\ndist:\n  world_size: 8\nlogging:\n  folder: /tmp/\n\
             lr:\n  lr: 1.7\n  lr_schedule_type: cyclic\nmodel:\n  arch: resnet50\nresolution:\n  end_ramp: {end_ramp}\n  \
             max_res: 192\n  min_res: 160\n  start_ramp: {start_ramp}\ntraining:\n  batch_size: 512\n  bn_wd: 0\n  \
             distributed: 1\n  epochs: {epochs}\n  label_smoothing: 0.1\n  momentum: 0.9\n  optimizer: sgd\n  \
             weight_decay: 0.0001\n  use_blurpool: 1\nvalidation:\n  lr_tta: true\n  resolution: 256\n"
        )
    }

    fn imported(yaml: &str, arguments: &[&str]) -> Result<FfcvRecipe, String> {
        let mut config = serde_saphyr::from_str(yaml).unwrap();
        let arguments: Vec<_> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        apply(&mut config, &arguments)?;
        import("imported", config)
    }

    fn spec(imported: &FfcvRecipe) -> JobSpec {
        JobSpec::from_toml(&imported.recipe.to_string(), &[]).unwrap()
    }

    #[test]
    fn the_published_configurations_become_the_recipes_that_come_with_baton() {
        for (epochs, start, end) in
            [(16, 11, 13), (24, 17, 20), (32, 23, 27), (40, 29, 34), (56, 41, 48), (88, 65, 76)]
        {
            let recipe = format!(
                "{}/../../recipes/resnet50_ffcv_{epochs}ep.toml",
                env!("CARGO_MANIFEST_DIR")
            );
            let ours = read(Path::new(&recipe), &[]).unwrap();
            let theirs = spec(&imported(&published(epochs, start, end), &[]).unwrap());
            let differences = ours.differences(&theirs);
            let fields: Vec<_> =
                differences.iter().map(|difference| difference.field.as_str()).collect();
            let of_this_machine = ["name", "data.train", "data.val", "data.prefetch_batches"];
            assert!(
                fields.iter().all(|field| of_this_machine.contains(field)),
                "{epochs}: {fields:?}"
            );
        }
    }

    #[test]
    fn arguments_of_the_script_go_before_the_file() {
        let arguments = [
            "--data.train_dataset=/ssd/train.ffcv",
            "--lr.lr=0.5",
            "--training.distributed=0",
            "--lr.lr_peak_epoch=4",
        ];
        let imported = imported(&published(16, 11, 13), &arguments).unwrap();
        let spec = spec(&imported);
        assert_eq!(spec.data.train.to_string(), "/ssd/train.ffcv");
        assert_eq!((spec.train.global_batch, spec.train.virtual_ranks), (512, 1));
        assert!(
            imported
                .recipe
                .to_string()
                .contains("points = [[0.0, 0.00005], [4.0, 0.5], [16.0, 0.0]]")
        );
        assert!(
            imported.notes.iter().any(|note| note.starts_with("data.val: set it")),
            "{:?}",
            imported.notes
        );
        assert!(!imported.notes.iter().any(|note| note.starts_with("data.train")));
    }

    #[test]
    fn what_is_not_given_is_as_in_the_script() {
        let spec = spec(&imported("{}", &[]).unwrap());
        assert_eq!(
            (spec.train.epochs, spec.train.global_batch, spec.train.resolution),
            (30, 512, 160)
        );
        assert_eq!(spec.loss.label_smoothing, 0.1);
    }

    #[test]
    fn a_step_schedule_is_linear_in_the_epoch_before_each_step_as_in_the_script() {
        let yaml = "{lr: {lr: 0.4, lr_schedule_type: step, step_length: 3}, training: {epochs: 8}}";
        let recipe = imported(yaml, &[]).unwrap().recipe.to_string();
        let points = "[[0.0, 0.4], [2.0, 0.4], [3.0, 0.04], [5.0, 0.04], [6.0, 0.004], [7.0, 0.004], [8.0, 0.0]]";
        assert!(recipe.contains(points), "{recipe}");
    }

    #[test]
    fn what_a_recipe_cannot_say_is_refused_by_its_name() {
        for (yaml, problem) in [
            ("{model: {arch: vit_b_16}}", "model.arch = vit_b_16: this network is not built in"),
            ("{training: {eval_only: 1}}", "training.eval_only: `baton-worker eval`"),
            ("{training: {mixup: 1}}", "training: unknown field `mixup`"),
            ("{training: {use_blurpool: 2}}", "training: 2 is neither 0 nor 1"),
            ("{optim: {lr: 1}}", "optim: ffcv-imagenet has no such section"),
            (
                "{lr: {lr_schedule_type: cosine}}",
                "lr.lr_schedule_type = cosine: it is cyclic or step",
            ),
            ("{lr: {lr_schedule_type: step, step_length: 0}}", "lr.step_length = 0"),
            ("{resolution: {min_res: 192, max_res: 160}}", "resolution: max_res is below min_res"),
        ] {
            let refused = imported(yaml, &[]).err().unwrap_or_default();
            assert!(refused.starts_with(problem), "{yaml}: {refused}");
        }
        let refused = imported("{}", &["lr=3"]).err().unwrap_or_default();
        assert!(refused.starts_with("lr=3: give --SECTION.KEY=VALUE"), "{refused}");
    }
}
