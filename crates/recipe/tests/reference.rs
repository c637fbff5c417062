//! Tests that the tables of `docs/recipes.md` match the doc comments in `src/spec/`. After a change of a comment, run
//! `make fix`, or `BATON_WRITE=1 cargo test -p baton-recipe --test reference`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail loudly")]

use std::{collections::BTreeMap, env, fs, path::Path};

mod kit;

use serde_json::Value;

/// Together these recipes have every section and every kind, and only required values.
const SAMPLES: [[&str; 2]; 9] = [
    ["optimizer={ kind='sgd' };augment.rand_augment={}", "schedule={ kind='constant', lr=0.1 }"],
    ["optimizer={ kind='adamw' }", "schedule={ kind='warmup_cosine', peak_lr=0.1 }"],
    ["optimizer={ kind='lars' }", "schedule={ kind='one_cycle', peak_lr=0.1 }"],
    ["optimizer={ kind='lamb' }", "schedule={ kind='constant', lr=0.1 }"],
    ["optimizer={ kind='muon' }", "schedule={ kind='constant', lr=0.1 }"],
    ["ema={ decay=0.9 }", "schedule={ kind='piecewise_linear', points=[[0.0, 0.1]] }"],
    [
        "train.phases=[{ from_epoch=1, resolution=64, global_batch=8 }]",
        "schedule={ kind='step', lr=0.1, milestones=[1.0] }",
    ],
    ["model.arch='resnet34_1d';augment.signal={}", "schedule={ kind='constant', lr=0.1 }"],
    [LANGUAGE_MODEL, "schedule={ kind='warmup_linear', peak_lr=0.1 }"],
];

/// Sections inside of sections: the tables of these have their fields.
const NESTED: [&str; 5] = ["AugmentSignal", "Generate", "LossScale", "RandAugment", "Target"];

/// Changes that belong together, divided by `;`.
const LANGUAGE_MODEL: &str = "model={ arch='causal_lm', path='model' };loss={ kind='next_token' };data.sequence=64;\
                              adapter={ rank=8, alpha=16 };evaluation.generate={}";

/// Section, field and text for the table: fields that the parser does not require, although most recipes must set them.
const REQUIRED_BY_MOST: [(&str, &str, &str); 1] =
    [("/model", "num_classes", "required, except by `causal_lm`")];

/// A section, or one kind of a section with kinds.
#[derive(Debug, Default)]
struct Item {
    kind: Option<String>,
    doc: String,
    fields: Vec<Field>,
}

#[derive(Debug)]
struct Field {
    name: String,
    type_name: String,
    doc: String,
    has_default: bool,
}

/// All types with fields in `src/spec/`.
fn items() -> BTreeMap<String, Vec<Item>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/spec");
    let mut items = BTreeMap::<String, Vec<Item>>::new();
    for entry in fs::read_dir(folder).unwrap() {
        read_items(&fs::read_to_string(entry.unwrap().path()).unwrap(), &mut items);
    }
    // These are not sections of a recipe.
    items.retain(|name, _| !["FieldDifference", "Resolved", "Violation"].contains(&name.as_str()));
    items
}

fn read_items(source: &str, items: &mut BTreeMap<String, Vec<Item>>) {
    let (mut doc, mut attributes) = (Vec::new(), String::new());
    let mut open: Option<(String, String)> = None;
    for line in source.lines() {
        let code = line.trim();
        if let Some(text) = code.strip_prefix("///") {
            doc.push(text.trim());
            continue;
        }
        if code.starts_with("#[") {
            attributes += code;
            continue;
        }
        let declared =
            |keyword| code.strip_prefix(keyword).and_then(|rest: &str| rest.strip_suffix(" {"));
        if let Some(name) = declared("pub struct ") {
            open = Some((name.to_owned(), attributes.clone()));
            items.entry(name.to_owned()).or_default().push(Item::default());
        } else if let Some(name) = declared("pub enum ") {
            // An enum without fields has no table; the doc comment of its field lists the values.
            open = attributes.contains("tag = ").then(|| (name.to_owned(), attributes.clone()));
        } else if line == "}" {
            open = None;
        } else if let Some((of, outer)) = &open {
            if let Some(variant) = code.strip_suffix(" {") {
                let kind = kind(variant, outer.contains("snake_case"));
                let item = Item { kind: Some(kind), doc: doc.join(" "), fields: Vec::new() };
                items.entry(of.clone()).or_default().push(item);
            } else if let Some((name, type_name)) =
                code.strip_suffix(',').and_then(|code| code.split_once(": "))
            {
                let field = Field {
                    name: name.trim_start_matches("pub ").to_owned(),
                    type_name: type_name.to_owned(),
                    doc: doc.join(" "),
                    has_default: attributes.contains("default") || outer.contains(", default)"),
                };
                items.get_mut(of).unwrap().last_mut().unwrap().fields.push(field);
            }
        }
        doc.clear();
        attributes.clear();
    }
}

/// The name of a variant in a recipe.
fn kind(variant: &str, snake_case: bool) -> String {
    let mut word = String::new();
    for letter in variant.chars() {
        if snake_case && letter.is_uppercase() && !word.is_empty() {
            word.push('_');
        }
        word.extend(letter.to_lowercase());
    }
    word
}

struct Reference {
    items: BTreeMap<String, Vec<Item>>,
    samples: Vec<Value>,
}

impl Reference {
    fn new() -> Self {
        let sample = |changes: [&str; 2]| {
            let changes: Vec<&str> = changes.iter().flat_map(|change| change.split(';')).collect();
            let spec = kit::recipe(&[], &changes);
            serde_json::from_str(&spec.to_json()).unwrap()
        };
        Self { items: items(), samples: SAMPLES.map(sample).into() }
    }

    /// The type of a field, if this type has fields.
    fn inner<'a>(&self, field: &'a Field) -> Option<&'a str> {
        let name = field.type_name.trim_start_matches("Option<").trim_start_matches("Vec<");
        let name = name.trim_end_matches('>');
        self.items.contains_key(name).then_some(name)
    }

    /// JSON pointer to the values of a type.
    fn pointer(&self, type_name: &str) -> String {
        let owner = self.items.iter().find_map(|(owner, items)| {
            let field = items[0].fields.iter().find(|field| self.inner(field) == Some(type_name));
            field.map(|field| (owner, field))
        });
        let Some((owner, field)) = owner else { return String::new() };
        let index = if field.type_name.starts_with("Vec<") { "/0" } else { "" };
        format!("{}/{}{index}", self.pointer(owner), field.name)
    }

    fn default_of(&self, pointer: &str, kind: Option<&str>, field: &Field) -> String {
        if !field.has_default {
            return "required".to_owned();
        }
        let exception = REQUIRED_BY_MOST
            .iter()
            .find(|(section, name, _)| *section == pointer && *name == field.name);
        if let Some((_, _, text)) = exception {
            return (*text).to_owned();
        }
        let of_kind = |sample: &&Value| {
            kind.is_none()
                || sample.pointer(&format!("{pointer}/kind")).and_then(Value::as_str) == kind
        };
        let sections =
            self.samples.iter().filter(of_kind).filter_map(|sample| sample.pointer(pointer));
        // A field that is absent in one sample is absent by default.
        let values: Option<Vec<&Value>> =
            sections.map(|section| section.get(&field.name)).collect();
        match values.as_ref().and_then(|values| values.first()) {
            None => "absent".to_owned(),
            Some(value @ (Value::Array(_) | Value::String(_))) => {
                format!("`{}`", value.to_string().replace(',', ", "))
            }
            Some(value) => value.to_string(),
        }
    }

    /// The lines of a table.
    fn table(&self, type_name: &str) -> Vec<String> {
        let items = &self.items[type_name];
        let pointer = self.pointer(type_name);
        if items[0].kind.is_none() {
            let head =
                ["| field | default | meaning and rule |", "|---|---|---|"].map(str::to_owned);
            return head.into_iter().chain(self.rows(&items[0], &pointer, "")).collect();
        }
        let kinds: Vec<String> = items
            .iter()
            .map(|item| {
                format!("`{}`: {}", item.kind.as_ref().unwrap(), item.doc.trim_end_matches('.'))
            })
            .collect();
        let mut rows: Vec<(String, Vec<&str>, String)> = Vec::new();
        for item in items {
            let kind = item.kind.as_deref();
            for field in &item.fields {
                let name = format!("`{}`", field.name);
                let rest = format!("{} | {}", self.default_of(&pointer, kind, field), field.doc);
                match rows.iter_mut().find(|row| row.0 == name && row.2 == rest) {
                    Some(row) => row.1.extend(kind),
                    None => rows.push((name, kind.into_iter().collect(), rest)),
                }
            }
        }
        let mut lines = vec![
            "| field | of `kind` | default | meaning and rule |".to_owned(),
            "|---|---|---|---|".to_owned(),
            format!("| `kind` | all | required | {}. |", kinds.join("; ")),
        ];
        lines.extend(
            rows.iter()
                .map(|(name, kinds, rest)| format!("| {name} | {} | {rest} |", kinds.join(", "))),
        );
        lines
    }

    fn rows(&self, item: &Item, pointer: &str, prefix: &str) -> Vec<String> {
        let mut rows = Vec::new();
        for field in &item.fields {
            let name = format!("{prefix}{}", field.name);
            match self.inner(field) {
                // Sections, and items of lists, have their own tables.
                Some(_) if pointer.is_empty() => {}
                Some(inner) if !field.type_name.starts_with("Vec<") => {
                    let pointer = format!("{pointer}/{}", field.name);
                    rows.extend(self.rows(&self.items[inner][0], &pointer, &format!("{name}.")));
                }
                _ => {
                    let default = self.default_of(pointer, None, field);
                    rows.push(format!("| `{name}` | {default} | {} |", field.doc));
                }
            }
        }
        rows
    }
}

#[test]
fn the_reference_page_matches_the_doc_comments() {
    let reference = Reference::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/recipes.md");
    let page = fs::read_to_string(&path).unwrap();
    let (mut expected, mut is_table) = (String::new(), false);
    for line in page.lines() {
        is_table &= line.starts_with('|');
        if is_table {
            continue;
        }
        expected += line;
        expected.push('\n');
        let marked =
            line.strip_prefix("<!-- fields of ").and_then(|rest| rest.strip_suffix(" -->"));
        if let Some(type_name) = marked {
            for row in reference.table(type_name) {
                expected += &row;
                expected.push('\n');
            }
            is_table = true;
        }
    }
    for name in reference.items.keys().filter(|name| !NESTED.contains(&name.as_str())) {
        assert!(expected.contains(&format!("<!-- fields of {name} -->")), "no table of {name}");
    }
    if env::var_os("BATON_WRITE").is_some() {
        fs::write(&path, &expected).unwrap();
        return;
    }
    let differing = page.lines().zip(expected.lines()).find(|(line, expected)| line != expected);
    assert!(page == expected, "`make fix` rewrites docs/recipes.md; it differs in {differing:#?}");
}

#[test]
fn the_reference_has_every_field_of_a_recipe() {
    fn check(value: &Value, path: &str, tables: &BTreeMap<String, String>) {
        let Value::Object(fields) = value else {
            let (section, key) = path.rsplit_once('.').unwrap_or(("", path));
            // A nested section is part of the table of its parent, with a longer name.
            let (section, key) = match section.split_once('.') {
                Some((section, inner)) => (section, format!("{inner}.{key}")),
                None => (section, key.to_owned()),
            };
            assert!(tables[section].contains(&format!("| `{key}` |")), "{path} has no row");
            return;
        };
        for (key, value) in fields {
            check(
                value,
                &if path.is_empty() { key.clone() } else { format!("{path}.{key}") },
                tables,
            );
        }
    }
    let reference = Reference::new();
    let tables: BTreeMap<String, String> = reference
        .items
        .keys()
        .map(|name| (reference.pointer(name), name))
        .filter(|(pointer, _)| pointer.matches('/').count() < 2)
        .map(|(pointer, name)| {
            (pointer.trim_start_matches('/').to_owned(), reference.table(name).join("\n"))
        })
        .collect();
    for sample in &reference.samples {
        check(sample, "", &tables);
    }
}
