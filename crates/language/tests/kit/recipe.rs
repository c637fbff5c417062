//! A recipe for the models of this kit; in a file of its own, because other crates use only the models.

use std::path::Path;

use baton_recipe::JobSpec;

/// A recipe that trains an adapter of the model in `folder`.
pub(crate) fn recipe(folder: &Path, change: &[&str]) -> JobSpec {
    let text = format!(
        "name = 'tune'\n[model]\narch = 'causal_lm'\npath = {folder:?}\n[adapter]\nrank = 4\nalpha = 8\n\
         [data]\ntrain = 'x'\nval = 'x'\nsequence = 64\n[train]\nepochs = 1\nglobal_batch = 8\n\
         [optimizer]\nkind = 'adamw'\n[schedule]\nkind = 'constant'\nlr = 1e-3\n[loss]\nkind = 'next_token'\n"
    );
    let change: Vec<String> = change.iter().map(|change| (*change).to_owned()).collect();
    JobSpec::from_toml(&text, &change).unwrap()
}
