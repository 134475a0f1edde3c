//! Tests with small servers that send what no honest one does. The official server is in `tests/python/test_mcp.py`.

use super::*;
use axum::{
    Router,
    body::Bytes,
    http::{HeaderMap, Method, StatusCode},
    response::{IntoResponse, Response},
};
use serde_json::json;
use std::sync::{Mutex, atomic::AtomicU32, atomic::Ordering};

/// The requests that came: the method of the protocol (or of HTTP if there is none), and the headers.
type Requests = Arc<Mutex<Vec<(String, HeaderMap)>>>;

/// A server that answers each request by `answer`.
async fn server<R: IntoResponse>(answer: impl Fn(&str, &Value, &HeaderMap) -> R + Clone + Send + Sync + 'static) -> (McpServer, Requests) {
    let asked = Requests::default();
    let seen = Arc::clone(&asked);
    let all = move |http: Method, headers: HeaderMap, body: Bytes| async move {
        let request: Value = serde_json::from_slice(&body).unwrap_or_default();
        let method = request["method"].as_str().unwrap_or(http.as_str());
        seen.lock().unwrap().push((method.to_owned(), headers.clone()));
        answer(method, &request, &headers).into_response()
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/mcp", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(all)).await });
    (McpServer::new(settings(url)).unwrap(), asked)
}

fn settings(url: String) -> McpSettings {
    McpSettings {
        name: "sky".into(),
        target: Target { url, ca: None },
        token: None,
        timeout: Duration::from_secs(5),
        allowed: None,
        strict: false,
        permission: Permission::Paying,
    }
}

/// A server of the older kind, with sessions.
fn old(method: &str, request: &Value) -> Response {
    let result = match method {
        "initialize" => {
            json!({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}})
        }
        "tools/list" => json!({"tools": [{"name": "weather", "description": "d", "inputSchema": {"type": "object"}}]}),
        "tools/call" => json!({"content": [{"type": "text", "text": "sunny"}]}),
        "server/discover" => return (StatusCode::BAD_REQUEST, "Missing session ID").into_response(),
        _ => return StatusCode::ACCEPTED.into_response(),
    };
    let headers = [("content-type", "application/json"), ("mcp-session-id", "s1")];
    (headers, reply(request, &result).to_string()).into_response()
}

fn reply(request: &Value, result: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": request["id"], "result": result})
}

fn events(messages: &[Value]) -> Response {
    let text: String = messages.iter().map(|message| format!("event: message\r\ndata: {message}\r\n\r\n")).collect();
    ([("content-type", "text/event-stream; charset=utf-8")], format!(": hello\n\n{text}")).into_response()
}

async fn looked(server: &McpServer) -> Result<Option<Connection>, String> {
    let mut connection = None;
    server.learn(server.look_at(&mut connection).await?);
    Ok(connection)
}

async fn weather(server: McpServer) -> Result<String, String> {
    let _connection = looked(&server).await?;
    Arc::new(server).call(None, "sky__weather".into(), json!({})).await
}

#[tokio::test]
async fn an_older_server_is_asked_as_it_wants_it_and_its_session_kept() {
    let (server, asked) = server(|method, request, _| old(method, request)).await;
    assert_eq!(weather(server).await, Ok("sunny".into()));
    let asked = asked.lock().unwrap();
    let methods: Vec<_> = asked.iter().map(|(method, _)| method.as_str()).filter(|method| *method != "DELETE").collect();
    assert_eq!(methods, ["server/discover", "initialize", "notifications/initialized", "tools/list", "tools/call"]);
    for (method, headers) in &asked[2..] {
        assert_eq!(headers["mcp-session-id"], "s1", "{method}");
        assert_eq!(headers["mcp-protocol-version"], "2025-06-18", "{method}");
    }
}

#[tokio::test]
async fn each_tenant_has_a_session_of_its_own() {
    let begun = Arc::new(AtomicU32::new(0));
    let (server, asked) = server(move |method, request, _| {
        let mut answer = old(method, request);
        if method == "initialize" {
            let session = format!("s{}", begun.fetch_add(1, Ordering::Relaxed));
            answer.headers_mut().insert("mcp-session-id", session.parse().unwrap());
        }
        answer
    })
    .await;
    let (_connection, server) = (looked(&server).await.unwrap(), Arc::new(server));
    for tenant in [Some("a"), Some("b"), Some("a"), None] {
        let called = Arc::clone(&server).call(tenant.map(Into::into), "sky__weather".into(), json!({})).await;
        assert_eq!(called, Ok("sunny".into()));
    }
    let asked = asked.lock().unwrap();
    let calls = asked.iter().filter(|(method, _)| method == "tools/call");
    let sessions: Vec<_> = calls.map(|(_, headers)| headers["mcp-session-id"].to_str().unwrap()).collect();
    assert_eq!(sessions, ["s1", "s2", "s1", "s0"]);
}

#[tokio::test]
async fn a_session_ends_with_the_connection() {
    let (server, asked) = server(|method, request, _| old(method, request)).await;
    let mut connection = looked(&server).await.unwrap().unwrap();
    connection.close_with_timeout(GOODBYE_MAX).await.unwrap();
    assert_eq!(asked.lock().unwrap().last().unwrap().0, "DELETE");
}

#[tokio::test]
async fn a_lost_session_is_begun_again() {
    let calls = Arc::new(AtomicU32::new(0));
    let (server, asked) = server(move |method, request, _| match method {
        "tools/call" if calls.fetch_add(1, Ordering::Relaxed) == 0 => StatusCode::NOT_FOUND.into_response(),
        _ => old(method, request),
    })
    .await;
    assert_eq!(weather(server).await, Ok("sunny".into()));
    assert_eq!(asked.lock().unwrap().iter().filter(|(method, _)| method == "initialize").count(), 2);
}

#[tokio::test]
async fn an_answer_may_be_a_stream() {
    let (server, _) = server(|method, request, _| match method {
        "tools/call" => events(&[
            json!({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}}),
            reply(request, &json!({"content": [{"type": "text", "text": "sun\nny"}]})),
        ]),
        _ => old(method, request),
    })
    .await;
    assert_eq!(weather(server).await, Ok("sun\nny".into()));
}

#[tokio::test]
async fn what_goes_wrong_is_said() {
    let text = |text: String| ([("content-type", "application/json")], text).into_response();
    let wrong = move |what: &'static str| {
        move |method: &str, request: &Value, _: &HeaderMap| match (method, what) {
            ("tools/call", "error") => {
                text(json!({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32602, "message": "Unknown tool"}}).to_string())
            }
            ("tools/call", "told") => {
                text(reply(request, &json!({"content": [{"type": "text", "text": "no sky"}], "isError": true})).to_string())
            }
            ("tools/call", "long") => text("x".repeat(5 << 20)),
            ("tools/call", "long stream") => events(&[json!("x".repeat(5 << 20))]),
            ("tools/call", "nonsense") => text("{".into()),
            ("tools/call", "page") => ([("content-type", "text/html")], "<p>").into_response(),
            ("tools/call", "elsewhere") => (StatusCode::FOUND, [("location", "http://127.0.0.1:1/")], "moved").into_response(),
            ("tools/call", "broken") => (StatusCode::INTERNAL_SERVER_ERROR, "oops").into_response(),
            _ => old(method, request),
        }
    };
    for (what, words) in [
        ("error", "Unknown tool"),
        ("told", "no sky"),
        ("long", "more than 4194304 bytes"),
        ("long stream", "connection to its server is lost"),
        ("nonsense", "EOF"),
        ("page", "text/html"),
        ("elsewhere", "status 302: moved"),
        ("broken", "status 500: oops"),
    ] {
        let (server, _) = server(wrong(what)).await;
        let error = weather(server).await.unwrap_err();
        assert!(error.contains(words), "{what}: {error}");
    }
}

#[tokio::test]
async fn a_version_that_is_not_known_is_none_to_speak() {
    let (server, _) = server(|method, request, _| match method {
        "initialize" => {
            let result = json!({"protocolVersion": "1999-01-01", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}});
            ([("content-type", "application/json")], reply(request, &result).to_string()).into_response()
        }
        _ => old(method, request),
    })
    .await;
    let error = looked(&server).await.unwrap_err();
    assert!(error.contains("version `1999-01-01`"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_down_is_no_reason_to_wait() {
    let server = McpServer::new(settings("http://127.0.0.1:1/mcp".into())).unwrap();
    assert!(looked(&server).await.unwrap_err().contains("refused"));
    assert_eq!(server.tools(), None);
    assert!(Arc::new(server).call(None, "sky__weather".into(), json!({})).await.unwrap_err().contains("not answered yet"));
}

#[tokio::test]
async fn names_are_legal_and_different_and_those_that_are_allowed() {
    let (listed, long) = (["a.b", "a/b", "c", "d"], "x".repeat(60));
    let tool = |name: &str| McpTool {
        shown: Tool { name: format!("sky__{}", plain(name)), description: None, parameters: None, strict: false },
        name: name.into(),
    };
    let mut server = McpServer::new(settings("http://127.0.0.1:1/mcp".into())).unwrap();
    let offered = |server: &McpServer| {
        let tools = server.offered(listed.iter().copied().chain([long.as_str()]).map(tool).collect());
        tools.into_iter().map(|(shown, tool)| format!("{shown} {}", tool.name)).collect::<Vec<_>>()
    };
    assert_eq!(offered(&server), ["sky__a_b a.b", "sky__c c", "sky__d d"]);
    server.allowed = Some(vec!["a/b".into(), "d".into(), "e".into()]);
    assert_eq!(offered(&server), ["sky__a_b a/b", "sky__d d"]);
}

#[test]
fn a_model_reads_texts_and_what_was_left_out() {
    let told = |result: Value| super::told(serde_json::from_value(result).unwrap());
    let content = json!([
        {"type": "text", "text": "sunny"},
        {"type": "image", "data": "AA==", "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
        {"type": "resource", "resource": {"uri": "file:///b", "blob": "AA=="}},
        {"type": "resource_link", "uri": "file:///c", "name": "c"},
    ]);
    let text = "sunny\n[an image was left out: image/png]\ninside\n[a file was left out: of no known type]\n[c: file:///c]";
    assert_eq!(told(json!({"content": content})), Ok(text.into()));
    assert_eq!(told(json!({"content": content, "isError": true})), Err(text.into()));
    assert_eq!(told(json!({"content": [], "structuredContent": {"a": 1}})), Ok(r#"{"a":1}"#.into()));
    let long = told(json!({"content": [{"type": "text", "text": "é".repeat(40_000)}]})).unwrap();
    assert_eq!(long.len(), TEXT_BYTES_MAX, "é has two bytes");
}

#[test]
fn a_server_that_fails_is_looked_at_less_and_less() {
    let pauses: Vec<_> = [1, 2, 3, 7, 1000].map(|failures| pause(failures).as_secs()).into();
    assert_eq!(pauses, [1, 2, 4, 60, 60]);
    assert_eq!(pause(0), LOOK_EVERY);
}
