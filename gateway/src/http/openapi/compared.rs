//! Comparison of the documents with the structs that read requests and write answers, so that neither has a field that the other lacks.
//! The structs are found in the sources: one that is new fails here until it has a row.

use super::{
    clients, objects, operators,
    schema::{
        Kind::{self, Any, Bool, Either, Integer, List, Null, Number, Text, Words},
        Object,
    },
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};
use syn::{
    Attribute, Fields, ItemEnum, ItemMod, ItemStruct, Meta, Token, Type,
    punctuated::Punctuated,
    visit::{self, Visit},
};

/// The directories and files all of whose structs are bodies, or parts of them.
const ROOMS: [&str; 2] = ["http", "requests"];
const USAGE: &str = "metrics/usage.rs";
/// Files with some structs that are, too.
const FILES: [&str; 4] = ["rollout/record.rs", "batch/life.rs", "base/registry.rs", "../../tenancy/src/limits.rs"];

/// The places of structs in the documents: file, struct, and objects.
const DOCUMENTED: &[(&str, &str, &[&str])] = &[
    ("http/openai.rs", "ChatRequest", &["ChatRequest", "TokenizeRequest"]),
    ("http/openai.rs", "ChatTool", &["Tool"]),
    ("http/openai.rs", "FunctionDefinition", &["FunctionDefinition"]),
    ("http/openai.rs", "Message", &["Message"]),
    ("http/openai.rs", "ChatToolCall", &["ToolCall"]),
    ("http/openai.rs", "ChatCustomCall", &["CustomCall"]),
    ("http/openai.rs", "ChatFunctionCall", &["FunctionCall"]),
    ("http/openai.rs", "TypedPart", &["ContentPart"]),
    ("http/openai.rs", "CompletionRequest", &["CompletionRequest"]),
    ("http/openai.rs", "ChatResponse", &["ChatCompletion"]),
    ("http/openai.rs", "ChatChoice", &["ChatChoice"]),
    ("http/openai.rs", "ChatMessage", &["ChatMessage"]),
    ("http/openai.rs", "Thought", &["ChatMessage", "ChatDelta"]),
    ("http/openai.rs", "CallPart", &["CallPart"]),
    ("http/openai.rs", "CustomPart", &["CustomPart"]),
    ("http/openai.rs", "FunctionPart", &["FunctionPart"]),
    ("http/openai.rs", "ServerToolCall", &["ServerToolCall"]),
    ("http/openai.rs", "ChatChunk", &["ChatChunk"]),
    ("http/openai.rs", "ChatChunkChoice", &["ChatChunkChoice"]),
    ("http/openai.rs", "ChatDelta", &["ChatDelta"]),
    ("http/openai.rs", "ChatLogprobs", &["ChatLogprobs"]),
    ("http/openai.rs", "ChatTokenLogprob", &["ChatTokenLogprob"]),
    ("http/openai.rs", "ChatToken", &["ChatToken", "ChatTokenLogprob"]),
    ("http/openai.rs", "CompletionResponse", &["Completion"]),
    ("http/openai.rs", "CompletionChoice", &["CompletionChoice"]),
    ("http/openai.rs", "CompletionLogprobs", &["CompletionLogprobs"]),
    ("http/openai.rs", "ModelList", &["ModelList"]),
    ("http/openai.rs", "Model", &["Model"]),
    ("http/openai.rs", "ModelCard", &["ModelCard"]),
    ("http/openai.rs", "TruncationPolicy", &["TruncationPolicy"]),
    ("http/stored.rs", "Named", &["ChatRequest"]),
    ("http/context.rs", "ContextWish", &["ContextWish"]),
    ("http/conversations/turn.rs", "TurnOptions", &["ConversationTurn"]),
    ("http/conversations/record.rs", "Changes", &["ConversationRequest", "ConversationChange", "BranchRequest", "ConversationTurn"]),
    ("http/conversations/record.rs", "Conversation", &["Conversation"]),
    ("http/conversations.rs", "Fields", &["ConversationRequest", "ItemsRequest"]),
    ("http/conversations.rs", "BranchFields", &["BranchRequest"]),
    ("http/responses/request.rs", "Body", &["ResponseRequest"]),
    ("http/responses/request.rs", "ConversationField::Object", &["ConversationName"]),
    ("http/responses/request.rs", "ReasoningField", &["ReasoningWish"]),
    ("http/responses/request.rs", "TextField", &["TextWish"]),
    ("requests/items.rs", "Fields", &["InputItem"]),
    ("requests/items.rs", "Part", &["ContentPart"]),
    ("http/messages/request.rs", "Body", &["MessageRequest", "CountRequest"]),
    ("http/messages/request.rs", "Turn", &["Turn"]),
    ("http/messages/request.rs", "Block", &["Block"]),
    ("http/messages/request.rs", "Choice", &["ToolChoice"]),
    ("requests/thinking.rs", "Thinking", &["Thinking"]),
    ("http/messages/request.rs", "OutputConfig", &["OutputConfig"]),
    ("requests/generate.rs", "GenerateRequest", &["ChatRequest", "CompletionRequest", "ResponseRequest", "MessageRequest", "CountRequest"]),
    ("requests/generate.rs", "SafetySetting", &["SafetySetting"]),
    ("requests/generate.rs", "StreamOptions", &["StreamOptions"]),
    ("requests/generate.rs", "StructuredOutputs", &["StructuredOutputs"]),
    ("requests/generate.rs", "Nvext", &["Nvext"]),
    ("requests/generate.rs", "ResponseFormat", &["ResponseFormat"]),
    ("requests/generate.rs", "JsonSchema", &["JsonSchema"]),
    ("http/embeddings.rs", "Fields", &["EmbeddingRequest"]),
    ("http/rerank.rs", "Fields", &["RerankRequest"]),
    ("http/rerank.rs", "Document::Object", &["RerankDocument"]),
    ("http/score.rs", "Fields", &["ScoreRequest"]),
    ("http/classify.rs", "Fields", &["ClassifyRequest"]),
    ("http/moderations.rs", "Moderation", &["ModerationRequest"]),
    ("http/moderations.rs", "Part", &["ModerationPart"]),
    ("http/tokenize.rs", "Fields", &["TokenizeRequest"]),
    ("http/tokenize.rs", "Tokens", &["DetokenizeRequest"]),
    ("http/tokenize.rs", "Tokenized", &["Tokenized"]),
    ("http/memories.rs", "Memory", &["Memory"]),
    ("http/memories.rs", "Fields", &["MemoryRequest"]),
    ("http/batches.rs", "Fields", &["BatchRequest"]),
    ("http/batches.rs", "ExpiresAfter", &["ExpiresAfter"]),
    ("http/appeals.rs", "Appeal", &["AppealRequest"]),
    ("http/appeals.rs", "Decided", &["AppealDecision"]),
    ("http/feedback.rs", "Given", &["FeedbackRequest"]),
    ("http/written.rs", "List", &["ItemList"]),
    ("http/admin.rs", "NewKey", &["NewKey"]),
    ("http/admin.rs", "TenantFields", &["TenantChange"]),
    ("../../tenancy/src/limits.rs", "Overrides", &["Limits"]),
    ("http/erasure.rs", "Wanted", &["ErasureRequest"]),
    ("http/records.rs", "Put", &["RecordChange"]),
    ("http/records.rs", "Records", &["RecordList"]),
    ("base/registry.rs", "RecordView", &["Record"]),
    ("http/rollouts.rs", "Named", &["RolloutAction"]),
    ("http/rollouts.rs", "Votes", &["RolloutVotes"]),
    ("rollout/record.rs", "NewRollout", &["NewRollout"]),
    ("rollout/record.rs", "Limits", &["RolloutLimits"]),
    ("rollout/record.rs", "Golden", &["Golden"]),
    ("http/operator.rs", "Shown", &["Cluster"]),
    ("metrics/usage.rs", "Usage", &["Usage"]),
    ("metrics/usage.rs", "PromptTokensDetails", &["PromptTokensDetails"]),
    ("metrics/usage.rs", "CompletionTokensDetails", &["CompletionTokensDetails"]),
    ("metrics/usage.rs", "TidemillUsage", &["TidemillUsage"]),
    ("metrics/usage.rs", "SimilarQuestion", &["SimilarQuestion"]),
    ("metrics/usage.rs", "RouteUsage", &["RouteUsage"]),
    ("metrics/usage.rs", "ContextUsage", &["ContextUsage"]),
    ("metrics/usage.rs", "RankedUsage", &["RankedUsage"]),
    ("metrics/usage.rs", "SummaryUsage", &["SummaryUsage"]),
    ("metrics/usage.rs", "RetrievedUsage", &["RetrievedUsage"]),
    ("metrics/usage.rs", "MemoryUsage", &["MemoryUsage"]),
    ("batch/life.rs", "Counts", &["RequestCounts"]),
];

/// Structs that read queries: file, struct, and paths.
const QUERIES: &[(&str, &str, &[&str])] = &[
    (
        "http/pages.rs",
        "PageQuery",
        &["/v1/responses/{id}/input_items", "/v1/conversations", "/v1/conversations/{id}/items", "/v1/memories"],
    ),
    ("http/models.rs", "PageQuery", &["/v1/models"]),
    ("http/files.rs", "ListQuery", &["/v1/files", "/v1/batches"]),
    ("http/feedback.rs", "ListQuery", &["/admin/feedback"]),
    ("http/appeals.rs", "ListQuery", &["/admin/appeals"]),
    ("http/replay.rs", "StreamQuery", &["/v1/responses/{id}", "/v1/chat/completions/{id}", "/v1/completions/{id}", "/v1/messages/{id}"]),
    ("http/parameters.rs", "ModelQuery", &["/tokenizer_info", "/reset_prefix_cache"]),
    ("http/records.rs", "Kind", &["/registry"]),
    ("http/records.rs", "Expected", &["/registry/{kind}/{*key}"]),
    ("http/export.rs", "Wanted", &["/admin/export"]),
    ("http/sign_in.rs", "Returned", &["/console/callback"]),
];

/// Structs that the documents leave out, with the reason.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("http/conversations/export.rs", "Line", "a line of a file"),
    ("http/export.rs", "Line", "a line of a file"),
    ("http/watch.rs", "Snapshot", "the console's own"),
    ("http/watch.rs", "Aged", "the console's own"),
];

/// Fields that their struct lets be missing, and that are asked for later.
const ASKED_FOR_LATER: [(&str, &str); 2] = [("MessageRequest", "max_tokens"), ("ItemsRequest", "items")];
/// Structs that are flattened into an object, or not there at all.
const SOMETIMES: [&str; 1] = ["http/openai.rs, Thought"];
/// Objects that no struct reads or writes: their fields are read or written one by one.
const BY_HAND: &[(&str, &str)] = &[("ConversationChange", "a part of ConversationRequest"), ("FileForm", "a form")];

/// A struct of the sources.
#[derive(Debug)]
struct Found {
    fields: Vec<FoundField>,
}

#[derive(Debug)]
struct FoundField {
    name: String,
    basic: Basic,
    is_option: bool,
    /// Whether a request may lack it.
    is_optional: bool,
    /// Whether an answer may leave it out.
    is_left_out: bool,
}

/// The kinds of types that are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Basic {
    Bool,
    Integer,
    Number,
    Text,
    List,
    Other,
}

#[derive(Default)]
struct Finder(Vec<(String, Found)>);

impl<'a> Visit<'a> for Finder {
    fn visit_item_mod(&mut self, module: &'a ItemMod) {
        let is_test = module.attrs.iter().any(|attribute| attribute.path().is_ident("cfg"));
        if !is_test {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_struct(&mut self, item: &'a ItemStruct) {
        self.take(item.ident.to_string(), &item.attrs, &item.fields);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'a ItemEnum) {
        for variant in &item.variants {
            self.take(format!("{}::{}", item.ident, variant.ident), &item.attrs, &variant.fields);
        }
        visit::visit_item_enum(self, item);
    }
}

impl Finder {
    /// Takes a struct or a variant with fields, if its attributes make it read or write JSON.
    fn take(&mut self, name: String, attributes: &[Attribute], fields: &Fields) {
        let derives = words(attributes, "derive");
        let Fields::Named(named) = fields else { return };
        if !derives.contains("Deserialize") && !derives.contains("Serialize") {
            return;
        }
        let all_default = settings(attributes).contains_key("default");
        let found = named.named.iter().filter_map(|field| {
            let settings = settings(&field.attrs);
            if ["flatten", "skip", "skip_deserializing"].iter().any(|skipped| settings.contains_key(*skipped)) {
                return None;
            }
            let ident = field.ident.as_ref()?.to_string();
            let name = settings.get("rename").cloned().flatten().unwrap_or_else(|| ident.trim_start_matches("r#").to_owned());
            let (is_option, basic) = basic(&field.ty);
            let is_optional = all_default || settings.contains_key("default") || is_option;
            Some(FoundField { name, basic, is_option, is_optional, is_left_out: settings.contains_key("skip_serializing_if") })
        });
        self.0.push((name, Found { fields: found.collect() }));
    }
}

/// The words of attributes such as `derive`, by their last segment.
fn words(attributes: &[Attribute], name: &str) -> BTreeSet<String> {
    let listed = attributes.iter().filter(|attribute| attribute.path().is_ident(name));
    let parsed = listed.filter_map(|attribute| attribute.parse_args_with(Punctuated::<syn::Path, Token![,]>::parse_terminated).ok());
    parsed.flatten().filter_map(|path| Some(path.segments.last()?.ident.to_string())).collect()
}

/// The settings of `serde` attributes, with the texts that some have.
fn settings(attributes: &[Attribute]) -> BTreeMap<String, Option<String>> {
    let serde = attributes.iter().filter(|attribute| attribute.path().is_ident("serde"));
    let parsed = serde.filter_map(|attribute| attribute.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).ok());
    let setting = |meta: Meta| {
        let text = match &meta {
            Meta::NameValue(pair) => match &pair.value {
                syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
                _ => None,
            },
            _ => None,
        };
        Some((meta.path().get_ident()?.to_string(), text))
    };
    parsed.flatten().filter_map(setting).collect()
}

/// Whether a type is optional, and the kind of what it holds.
fn basic(of: &Type) -> (bool, Basic) {
    match of {
        Type::Reference(reference) => basic(&reference.elem),
        Type::Array(_) | Type::Slice(_) => (false, Basic::List),
        Type::Path(path) => {
            let Some(last) = path.path.segments.last() else { return (false, Basic::Other) };
            let inner = || match &last.arguments {
                syn::PathArguments::AngleBracketed(arguments) => arguments.args.iter().find_map(|argument| match argument {
                    syn::GenericArgument::Type(inner) => Some(inner),
                    _ => None,
                }),
                _ => None,
            };
            let kind = match last.ident.to_string().as_str() {
                "Option" => return (true, inner().map_or(Basic::Other, |inner| basic(inner).1)),
                "Box" => return inner().map_or((false, Basic::Other), basic),
                "bool" => Basic::Bool,
                "u8" | "u16" | "u32" | "u64" | "usize" | "i32" | "i64" => Basic::Integer,
                "f32" | "f64" => Basic::Number,
                "String" | "str" => Basic::Text,
                "Vec" => Basic::List,
                _ => Basic::Other,
            };
            (false, kind)
        }
        _ => (false, Basic::Other),
    }
}

/// All structs that read or write JSON, by their file and name.
fn structs() -> BTreeMap<(String, String), Found> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files: Vec<String> = FILES.iter().chain([&USAGE]).map(|file| (*file).to_owned()).collect();
    let mut folders: Vec<String> = ROOMS.iter().map(|room| (*room).to_owned()).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder)).expect("the sources are there") {
            let entry = entry.expect("a folder is read");
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            match entry.file_type().expect("it has a type").is_dir() {
                true => folders.push(name),
                false if name.ends_with(".rs") => files.push(name),
                false => {}
            }
        }
    }
    let mut all = BTreeMap::new();
    for file in files {
        let text = fs::read_to_string(root.join(&file)).expect("a source is read");
        let mut finder = Finder::default();
        finder.visit_file(&syn::parse_file(&text).expect("the sources are Rust"));
        let is_meant = |name: &str| !FILES.contains(&file.as_str()) || DOCUMENTED.iter().any(|(at, of, _)| *at == file && *of == name);
        all.extend(finder.0.into_iter().filter(|(name, _)| is_meant(name)).map(|(name, found)| ((file.clone(), name), found)));
    }
    all
}

fn object(name: &str) -> &'static Object {
    objects::all().find(|object| object.name == name).unwrap_or_else(|| panic!("no table of openapi/objects has `{name}`"))
}

/// Whether a documented form is that of a type.
fn fits(kind: Kind, basic: Basic) -> bool {
    match (kind, basic) {
        (_, Basic::Other)
        | (Bool, Basic::Bool)
        | (Integer, Basic::Integer)
        | (Number, Basic::Number)
        | (Text | Words(_), Basic::Text)
        | (List(_), Basic::List) => true,
        (Either(kinds), _) => kinds.iter().any(|kind| fits(*kind, basic)),
        _ => false,
    }
}

fn takes_null(kind: Kind) -> bool {
    match kind {
        Any | Null => true,
        Either(kinds) => kinds.contains(&Null),
        _ => false,
    }
}

/// The problems of a struct in an object.
fn problems(place: &str, found: &Found, object: &Object) -> Vec<String> {
    let ignored: BTreeSet<&str> = object.ignored().collect();
    let problem = |field: &FoundField| {
        let FoundField { name, basic, is_option, is_optional, is_left_out } = field;
        let may_be_missing = if object.is_sent { *is_optional } else { *is_left_out || SOMETIMES.contains(&place) };
        if ignored.contains(name.as_str()) {
            return None;
        }
        let Some(documented) = object.fields().find(|documented| documented.name == name) else {
            return Some("is missing: add it to the table, with `.ours()` if no other API has it".to_owned());
        };
        if !fits(documented.kind, *basic) {
            return Some(format!("is {:?} there, and {basic:?} in the code", documented.kind));
        }
        let is_late = ASKED_FOR_LATER.contains(&(object.name, name));
        if documented.is_needed == may_be_missing && !is_late {
            return Some(format!("is {} there", if documented.is_needed { "needed" } else { "not needed" }));
        }
        let wrong_null = match object.is_sent {
            true => !documented.is_needed && documented.takes_null != *is_option && *basic != Basic::Other,
            false => *is_option && !may_be_missing && !takes_null(documented.kind),
        };
        wrong_null.then(|| "is null in one of them".to_owned())
    };
    found.fields.iter().filter_map(|field| Some(format!("{}.{} ({place}) {}", object.name, field.name, problem(field)?))).collect()
}

/// The difference between a struct and the query of a path, if there is one.
fn wrong_query(place: &str, found: &Found, path: &str) -> Option<String> {
    let read: BTreeSet<_> = found.fields.iter().map(|field| field.name.as_str()).collect();
    let operations = || clients::OPERATIONS.iter().chain(operators::OPERATIONS).filter(|operation| operation.path == path);
    let has_it = operations().any(|operation| operation.query.iter().map(|field| field.name).collect::<BTreeSet<_>>() == read);
    (!has_it).then(|| format!("{path} ({place}): no operation there has the query {read:?}"))
}

#[test]
fn every_field_that_is_read_or_written_is_in_the_documents() {
    let structs = structs();
    let mut wrong: Vec<String> = Vec::new();
    for ((file, name), found) in &structs {
        let place = format!("{file}, {name}");
        match DOCUMENTED.iter().find(|(at, of, _)| at == file && of == name) {
            Some((_, _, names)) => wrong.extend(names.iter().flat_map(|name| problems(&place, found, object(name)))),
            None if ELSEWHERE.iter().any(|(at, of, _)| at == file && of == name) => {}
            None => match QUERIES.iter().find(|(at, of, _)| at == file && of == name) {
                Some((_, _, paths)) => wrong.extend(paths.iter().filter_map(|path| wrong_query(&place, found, path))),
                None => wrong.push(format!("{place} has no row in DOCUMENTED, QUERIES or ELSEWHERE")),
            },
        }
    }
    assert!(wrong.is_empty(), "the documents of OpenAPI and the code differ:\n{}", wrong.join("\n"));
    let rows = DOCUMENTED.iter().chain(QUERIES).map(|(file, name, _)| (file, name));
    let rows = rows.chain(ELSEWHERE.iter().map(|(file, name, _)| (file, name)));
    let gone: Vec<_> = rows.filter(|(file, name)| !structs.contains_key(&((**file).to_owned(), (**name).to_owned()))).collect();
    assert!(gone.is_empty(), "these structs are gone: {gone:?}");
}

#[test]
fn every_field_of_a_request_in_the_documents_is_read() {
    let structs = structs();
    for object in objects::all().filter(|object| object.is_sent) {
        let of = DOCUMENTED.iter().filter(|(_, _, names)| names.contains(&object.name));
        let read: BTreeSet<_> = of
            .filter_map(|(file, name, _)| structs.get(&((*file).to_owned(), (*name).to_owned())))
            .flat_map(|found| found.fields.iter().map(|field| field.name.as_str()))
            .collect();
        let is_by_hand = BY_HAND.iter().any(|(name, _)| *name == object.name);
        let unread: Vec<_> = object.fields().map(|field| field.name).filter(|name| !read.contains(name)).collect();
        assert!(is_by_hand || unread.is_empty(), "nothing reads {unread:?} of {}", object.name);
    }
}
