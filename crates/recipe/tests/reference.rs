//! The tables of `docs/recipes.md` are the doc comments of `src/spec/`. After a change of those:
//! `make fix`, or `BATON_WRITE=1 cargo test -p baton-recipe --test reference`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may fail loudly")]

use std::{collections::BTreeMap, env, fs, path::Path};

mod kit;

use serde_json::Value;

/// Together they have every section and every kind, and no value that a recipe may leave out.
const SAMPLES: [[&str; 2]; 5] = [
    ["optimizer={ kind='sgd' }", "schedule={ kind='constant', lr=0.1 }"],
    [
        "optimizer={ kind='adamw' }",
        "schedule={ kind='warmup_cosine', peak_lr=0.1, warmup_epochs=1.0 }",
    ],
    ["optimizer={ kind='lars' }", "schedule={ kind='one_cycle', peak_lr=0.1 }"],
    ["ema={ decay=0.9 }", "schedule={ kind='piecewise_linear', points=[[0.0, 0.1]] }"],
    [
        "train.phases=[{ from_epoch=1, resolution=64, global_batch=8 }]",
        "schedule={ kind='step', lr=0.1, milestones=[1.0] }",
    ],
];

/// A section, or one kind of a section that has kinds.
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

/// The types of all files in `src/spec/` that have fields.
fn items() -> BTreeMap<String, Vec<Item>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/spec");
    let mut items = BTreeMap::<String, Vec<Item>>::new();
    for entry in fs::read_dir(folder).unwrap() {
        read_items(&fs::read_to_string(entry.unwrap().path()).unwrap(), &mut items);
    }
    // Those of no recipe.
    items.retain(|name, _| !["Difference", "Resolved", "Violation"].contains(&name.as_str()));
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
            // Those without fields are words, which the field that takes them lists.
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

/// The word for a variant in a recipe.
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
            let spec = kit::recipe(&[], &changes);
            serde_json::from_str(&spec.to_json()).unwrap()
        };
        Self { items: items(), samples: SAMPLES.map(sample).into() }
    }

    /// The type with fields that a field is of.
    fn inner<'a>(&self, field: &'a Field) -> Option<&'a str> {
        let name = field.type_name.trim_start_matches("Option<").trim_start_matches("Vec<");
        let name = name.trim_end_matches('>');
        self.items.contains_key(name).then_some(name)
    }

    /// Where values of a type stand, as a JSON pointer.
    fn place(&self, type_name: &str) -> String {
        let owner = self.items.iter().find_map(|(owner, items)| {
            let field = items[0].fields.iter().find(|field| self.inner(field) == Some(type_name));
            field.map(|field| (owner, field))
        });
        let Some((owner, field)) = owner else { return String::new() };
        let index = if field.type_name.starts_with("Vec<") { "/0" } else { "" };
        format!("{}/{}{index}", self.place(owner), field.name)
    }

    fn default_of(&self, place: &str, kind: Option<&str>, field: &Field) -> String {
        if !field.has_default {
            return "required".to_owned();
        }
        let of_kind = |sample: &&Value| {
            kind.is_none()
                || sample.pointer(&format!("{place}/kind")).and_then(Value::as_str) == kind
        };
        let sections =
            self.samples.iter().filter(of_kind).filter_map(|sample| sample.pointer(place));
        // Absent in one is absent by default.
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
        let place = self.place(type_name);
        if items[0].kind.is_none() {
            let head =
                ["| field | default | meaning and rule |", "|---|---|---|"].map(str::to_owned);
            return head.into_iter().chain(self.rows(&items[0], &place, "")).collect();
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
                let rest = format!("{} | {}", self.default_of(&place, kind, field), field.doc);
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

    fn rows(&self, item: &Item, place: &str, prefix: &str) -> Vec<String> {
        let mut rows = Vec::new();
        for field in &item.fields {
            let name = format!("{prefix}{}", field.name);
            match self.inner(field) {
                // The sections themselves have tables of their own, as has what stands in lists.
                Some(_) if place.is_empty() => {}
                Some(inner) if !field.type_name.starts_with("Vec<") => {
                    let place = format!("{place}/{}", field.name);
                    rows.extend(self.rows(&self.items[inner][0], &place, &format!("{name}.")));
                }
                _ => {
                    let default = self.default_of(place, None, field);
                    rows.push(format!("| `{name}` | {default} | {} |", field.doc));
                }
            }
        }
        rows
    }
}

#[test]
fn the_reference_page_is_what_the_code_says() {
    let reference = Reference::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/recipes.md");
    let page = fs::read_to_string(&path).unwrap();
    let (mut made, mut is_table) = (String::new(), false);
    for line in page.lines() {
        is_table &= line.starts_with('|');
        if is_table {
            continue;
        }
        made += line;
        made.push('\n');
        let marked =
            line.strip_prefix("<!-- fields of ").and_then(|rest| rest.strip_suffix(" -->"));
        if let Some(type_name) = marked {
            for row in reference.table(type_name) {
                made += &row;
                made.push('\n');
            }
            is_table = true;
        }
    }
    for name in
        reference.items.keys().filter(|name| !["LossScale", "Target"].contains(&name.as_str()))
    {
        assert!(made.contains(&format!("<!-- fields of {name} -->")), "no table of {name}");
    }
    if env::var_os("BATON_WRITE").is_some() {
        fs::write(&path, &made).unwrap();
        return;
    }
    let differing = page.lines().zip(made.lines()).find(|(there, made)| there != made);
    assert!(page == made, "`make fix` makes docs/recipes.md again; it differs in {differing:#?}");
}

#[test]
fn the_reference_has_every_value_that_a_recipe_can_have() {
    fn check(value: &Value, path: &str, tables: &BTreeMap<String, String>) {
        let Value::Object(fields) = value else {
            let (section, key) = path.rsplit_once('.').unwrap_or(("", path));
            // What a section's own table has under a longer name.
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
        .map(|name| (reference.place(name), name))
        .filter(|(place, _)| place.matches('/').count() < 2)
        .map(|(place, name)| {
            (place.trim_start_matches('/').to_owned(), reference.table(name).join("\n"))
        })
        .collect();
    for sample in &reference.samples {
        check(sample, "", &tables);
    }
}
