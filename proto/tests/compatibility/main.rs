//! Checks that nothing changes on which clients of version 1 rely.
//!
//! `v1.txt` lists every field, enum value and call that user tools can use. `node.proto` is not included: an agent and
//! its coordinator must have the same version (`src/frame.rs`).
//!
//! Every listed item must keep its name, number, type and label. A field may be removed if its number and name are
//! reserved, so that they are not used for something else. New items must be added with
//! `BATON_UPDATE_PROTO=1 cargo test -p baton-proto --test compatibility`; from then on they must not change.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

use std::{collections::BTreeSet, fs};

use baton_proto::DESCRIPTORS;
use prost::Message;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::{Label, Type},
};

const PROMISED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/compatibility/v1.txt");

/// The API in a set of files: one line for each item that a client may use.
#[derive(Debug, Default)]
struct Surface {
    lines: BTreeSet<String>,
    /// `message.number` and `message.name` of removed fields.
    reserved: BTreeSet<String>,
}

impl Surface {
    fn of(set: &FileDescriptorSet) -> Self {
        let mut surface = Self::default();
        let is_public = |file: &&FileDescriptorProto| {
            file.package() == "baton.v1" && file.name() != "baton/v1/node.proto"
        };
        for file in set.file.iter().filter(is_public) {
            for message in &file.message_type {
                surface.add_message("baton.v1", message);
            }
            for kind in &file.enum_type {
                surface.add_enum("baton.v1", kind);
            }
            for service in &file.service {
                for method in &service.method {
                    let stream = |streams| if streams { "stream " } else { "" };
                    surface.lines.insert(format!(
                        "call baton.v1.{}/{} ({}{}) returns ({}{})",
                        service.name(),
                        method.name(),
                        stream(method.client_streaming()),
                        method.input_type(),
                        stream(method.server_streaming()),
                        method.output_type()
                    ));
                }
            }
        }
        surface
    }

    fn add_message(&mut self, scope: &str, message: &DescriptorProto) {
        let name = format!("{scope}.{}", message.name());
        for field in &message.field {
            let label = match field.label() {
                Label::Repeated => "repeated ",
                _ if field.proto3_optional() => "optional ",
                _ => "",
            };
            let kind = match field.r#type() {
                Type::Message | Type::Enum => field.type_name().trim_start_matches('.').to_owned(),
                other => other.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
            };
            // A oneof does not change the wire format, but it changes the generated code.
            let oneof = match field.oneof_index {
                Some(index) if !field.proto3_optional() => {
                    format!(" of {}", message.oneof_decl[index as usize].name())
                }
                _ => String::new(),
            };
            self.lines.insert(format!(
                "field {name}.{} = {}: {label}{kind}{oneof}",
                field.name(),
                field.number()
            ));
        }
        for range in &message.reserved_range {
            self.reserved.extend((range.start()..range.end()).map(|n| format!("{name}.{n}")));
        }
        self.reserved.extend(message.reserved_name.iter().map(|field| format!("{name}.{field}")));
        for inner in &message.nested_type {
            self.add_message(&name, inner);
        }
        for kind in &message.enum_type {
            self.add_enum(&name, kind);
        }
    }

    fn add_enum(&mut self, scope: &str, kind: &EnumDescriptorProto) {
        for value in &kind.value {
            let line =
                format!("value {scope}.{}.{} = {}", kind.name(), value.name(), value.number());
            self.lines.insert(line);
        }
    }

    /// Promised lines that are neither unchanged nor reserved.
    fn broken<'a>(&self, promised: &'a str) -> Vec<&'a str> {
        let is_kept = |line: &&str| self.lines.contains(*line) || self.is_retired(line);
        promised.lines().filter(|line| !is_kept(line)).collect()
    }

    /// Whether a field is removed, and its number and name are reserved.
    fn is_retired(&self, line: &str) -> bool {
        let Some(field) = line.strip_prefix("field ") else { return false };
        let Some((path, rest)) = field.split_once(" = ") else { return false };
        let (Some((message, _)), Some((number, _))) = (path.rsplit_once('.'), rest.split_once(':'))
        else {
            return false;
        };
        self.reserved.contains(path) && self.reserved.contains(&format!("{message}.{number}"))
    }
}

fn present() -> Surface {
    Surface::of(&FileDescriptorSet::decode(DESCRIPTORS).unwrap())
}

#[test]
fn promised_items_are_unchanged_and_new_items_are_listed() {
    let present = present();
    let promised = fs::read_to_string(PROMISED).unwrap_or_default();
    let broken = present.broken(&promised);
    assert!(
        broken.is_empty(),
        "clients of version 1 rely on these; restore them, or reserve the number and the name of a removed field:\n{}",
        broken.join("\n")
    );
    let new: Vec<&String> =
        present.lines.iter().filter(|line| !promised.lines().any(|known| known == *line)).collect();
    if std::env::var_os("BATON_UPDATE_PROTO").is_some() {
        let lines: BTreeSet<&str> =
            promised.lines().chain(new.iter().map(|line| line.as_str())).collect();
        let text: String = lines.into_iter().map(|line| format!("{line}\n")).collect();
        fs::write(PROMISED, text).unwrap();
        return;
    }
    assert!(new.is_empty(), "not listed yet; see the top of this file: {new:#?}");
}

#[test]
fn a_change_that_breaks_clients_is_detected_and_a_reserved_removal_is_allowed() {
    let promised: String = present().lines.iter().map(|line| format!("{line}\n")).collect();
    let broken = |change: &dyn Fn(&mut DescriptorProto)| {
        let mut set = FileDescriptorSet::decode(DESCRIPTORS).unwrap();
        let messages = set.file.iter_mut().flat_map(|file| &mut file.message_type);
        change(messages.into_iter().find(|message| message.name() == "GetStatusResponse").unwrap());
        Surface::of(&set).broken(&promised).len()
    };
    let generation = |message: &DescriptorProto| {
        message.field.iter().position(|field| field.name() == "generation").unwrap()
    };
    assert_eq!(broken(&|_| ()), 0);
    assert_eq!(broken(&|message| drop(message.field.remove(generation(message)))), 1);
    assert_eq!(
        broken(&|message| {
            let index = generation(message);
            message.field[index].number = Some(99);
        }),
        1
    );
    assert_eq!(
        broken(&|message| {
            let index = generation(message);
            message.field[index].set_type(Type::String);
        }),
        1
    );
    let retire = |message: &mut DescriptorProto, with_name: bool| {
        let field = message.field.remove(generation(message));
        let range = prost_types::descriptor_proto::ReservedRange {
            start: field.number,
            end: field.number.map(|number| number + 1),
        };
        message.reserved_range.push(range);
        if with_name {
            message.reserved_name.push(field.name().to_owned());
        }
    };
    assert_eq!(broken(&|message| retire(message, true)), 0);
    assert_eq!(broken(&|message| retire(message, false)), 1, "another field could take its name");
}
