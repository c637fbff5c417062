//! `adapter_config.json`: what PEFT needs to know about an adapter, besides its matrices.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::Path,
};

use baton_recipe::{
    JobSpec,
    spec::{ALL_LINEAR, Adapter},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::adapter::{PEFT_PREFIX, is_end_of_name};

/// Name of the file with the matrices.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
/// Name of the file that describes an adapter.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

/// End of the names of matrices `A`, after the linear layer's name.
const A: &str = ".lora_A.weight";

/// `adapter_config.json` of the adapter of a recipe, for the tensors of its checkpoint.
///
/// # Errors
/// The recipe has no adapter, or the tensors are not those of an adapter.
pub fn adapter_config(spec: &JobSpec, tensors: &[&str]) -> Result<String, String> {
    let Some(adapter) = &spec.adapter else {
        return Err(
            "has no adapter, because its recipe has no [adapter]: it has whole weights, which `baton checkpoint \
             merge --to FOLDER` writes as a model"
                .to_owned(),
        );
    };
    let targets = target_modules(adapter, tensors)?;
    // A whole number as such: other programs read it as an integer.
    let alpha = match adapter.alpha as u64 {
        whole if whole as f64 == adapter.alpha => json!(whole),
        _ => json!(adapter.alpha),
    };
    let config = json!({
        "alpha_pattern": {},
        "base_model_name_or_path": spec.model.path,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "layers_pattern": Value::Null,
        "layers_to_transform": Value::Null,
        "lora_alpha": alpha,
        "lora_dropout": adapter.dropout,
        "modules_to_save": Value::Null,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {},
        "revision": Value::Null,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_rslora": adapter.rslora,
    });
    Ok(format!("{config:#}\n"))
}

/// What decides the factor of an adapter's matrices, which are the same with every factor.
#[derive(Deserialize)]
struct Description {
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    /// Other values of `lora_alpha` for some layers.
    #[serde(default)]
    alpha_pattern: BTreeMap<String, f64>,
    /// How PEFT began: `true`, `false`, or the name of a method.
    #[serde(default)]
    init_lora_weights: Value,
    /// The adapter applies only after these tokens (aLoRA).
    #[serde(default)]
    alora_invocation_tokens: Value,
}

/// Methods of PEFT that change the base model's weights too, by the beginnings of their names.
const CHANGE_THE_BASE: [&str; 5] = ["pissa", "olora", "loftq", "corda", "lora_ga"];

/// Compares the description beside `weights` with the recipe's adapter. A file of another name, or without a
/// description, is taken as it is.
///
/// # Errors
/// What differs, and what to do; or the description cannot be read.
pub fn check_description(weights: &Path, adapter: &Adapter) -> Result<(), String> {
    if weights.file_name().is_none_or(|name| name != ADAPTER_WEIGHTS) {
        return Ok(());
    }
    let text = match fs::read(weights.with_file_name(ADAPTER_CONFIG)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read.map_err(|error| format!("{ADAPTER_CONFIG} beside them: {error}"))?,
    };
    let description = serde_json::from_slice(&text)
        .map_err(|error| format!("{ADAPTER_CONFIG} beside them cannot be read: {error}"))?;
    let Description {
        lora_alpha,
        use_rslora,
        alpha_pattern,
        init_lora_weights,
        alora_invocation_tokens,
    } = description;
    let method = init_lora_weights.as_str().unwrap_or_default();
    if CHANGE_THE_BASE.iter().any(|known| method.starts_with(known)) {
        return Err(format!(
            "{ADAPTER_CONFIG} beside them has init_lora_weights = \"{method}\", which changes the base model's weights too: \
             save the adapter with PEFT's path_initial_model_for_weight_conversion, which makes it one for the unchanged \
             base"
        ));
    }
    if !alora_invocation_tokens.is_null() {
        return Err(format!(
            "{ADAPTER_CONFIG} beside them has alora_invocation_tokens, from which on alone the adapter applies, and here \
             it applies to all tokens"
        ));
    }
    if let Some(layer) = alpha_pattern.keys().next() {
        return Err(format!(
            "{ADAPTER_CONFIG} beside them has alpha_pattern, another factor for {layer}, and here all layers have one"
        ));
    }
    if (lora_alpha, use_rslora) != (adapter.alpha, adapter.rslora) {
        let Adapter { alpha, rslora, .. } = adapter;
        return Err(format!(
            "{ADAPTER_CONFIG} beside them says lora_alpha = {lora_alpha} and use_rslora = {use_rslora}, the recipe \
             alpha = {alpha} and rslora = {rslora}: set adapter.alpha = {lora_alpha} and adapter.rslora = \
             {use_rslora}, or move the description away to train them with another factor"
        ));
    }
    Ok(())
}

/// The adapted linear layers: the last part of the name where all layers have it, or else the whole name.
fn target_modules(adapter: &Adapter, tensors: &[&str]) -> Result<BTreeSet<String>, String> {
    let mut modules = BTreeSet::new();
    for tensor in tensors {
        let path = tensor.strip_prefix(PEFT_PREFIX).and_then(|path| path.strip_suffix(A));
        let Some(path) = path else { continue };
        // A target without the number of a layer is in every layer.
        let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        let is_everywhere = adapter.targets.iter().any(|target| {
            target == ALL_LINEAR
                || (is_end_of_name(path, target) && !target.split('.').any(is_number))
        });
        let leaf = path.rsplit('.').next().unwrap_or(path);
        modules.insert(if is_everywhere { leaf } else { path }.to_owned());
    }
    if modules.is_empty() || !tensors.len().is_multiple_of(2) {
        return Err("has tensors that are not those of an adapter".to_owned());
    }
    Ok(modules)
}

#[cfg(test)]
mod tests {
    use baton_recipe::spec::BaseFormat;

    use super::*;

    fn adapter(targets: &[&str]) -> Adapter {
        Adapter {
            rank: 4,
            alpha: 8.0,
            dropout: 0.0,
            rslora: false,
            targets: targets.iter().map(|target| (*target).to_owned()).collect(),
            base: BaseFormat::Auto,
        }
    }

    fn modules(targets: &[&str], paths: &[&str]) -> Vec<String> {
        let names = paths.iter().flat_map(|path| {
            ["lora_A", "lora_B"].map(|matrix| format!("{PEFT_PREFIX}{path}.{matrix}.weight"))
        });
        let names: Vec<String> = names.collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        target_modules(&adapter(targets), &names).unwrap().into_iter().collect()
    }

    #[test]
    fn a_description_with_another_factor_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let weights = folder.path().join(ADAPTER_WEIGHTS);
        let described = |config: &str| {
            fs::write(folder.path().join(ADAPTER_CONFIG), config).unwrap();
            check_description(&weights, &adapter(&[ALL_LINEAR]))
        };
        assert_eq!(check_description(&weights, &adapter(&[ALL_LINEAR])), Ok(()));
        assert_eq!(described(r#"{"r": 4, "lora_alpha": 8, "use_rslora": false}"#), Ok(()));
        assert_eq!(described(r#"{"r": 4, "lora_alpha": 8.0}"#), Ok(()));
        let plain = r#"{"lora_alpha": 8, "init_lora_weights": "gaussian", "alora_invocation_tokens": null}"#;
        assert_eq!(described(plain), Ok(()));
        for (config, problem) in [
            (r#"{"lora_alpha": 64}"#, "set adapter.alpha = 64 and adapter.rslora = false"),
            (r#"{"lora_alpha": 8, "use_rslora": true}"#, "adapter.rslora = true"),
            (r#"{"lora_alpha": 8, "alpha_pattern": {"q_proj": 4}}"#, "another factor for q_proj"),
            (
                r#"{"lora_alpha": 8, "init_lora_weights": "pissa_niter_4"}"#,
                "changes the base model's",
            ),
            (r#"{"lora_alpha": 8, "alora_invocation_tokens": [1, 2]}"#, "applies to all tokens"),
            (r#"{"r": 4}"#, "cannot be read: missing field `lora_alpha`"),
        ] {
            let error = described(config).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
        let other = folder.path().join("other.safetensors");
        assert_eq!(check_description(&other, &adapter(&[ALL_LINEAR])), Ok(()));
    }

    #[test]
    fn modules_of_all_layers_have_short_names_and_others_their_whole_path() {
        let paths = [
            "model.layers.0.self_attn.q_proj",
            "model.layers.1.self_attn.q_proj",
            "model.layers.1.mlp.down_proj",
        ];
        assert_eq!(
            modules(&["self_attn.q_proj", "layers.1.mlp.down_proj"], &paths),
            ["model.layers.1.mlp.down_proj", "q_proj"]
        );
        assert_eq!(modules(&[ALL_LINEAR], &paths), ["down_proj", "q_proj"]);
        let whole: Vec<&str> = paths[..2].to_vec();
        assert_eq!(modules(&whole, &paths[..2]), whole);
        assert!(target_modules(&adapter(&[ALL_LINEAR]), &["fc.weight", "fc.bias"]).is_err());
    }
}
