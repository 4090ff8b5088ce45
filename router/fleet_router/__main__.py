import asyncio, json, ssl, os, aiohttp, uuid
from aiohttp import web
T="/var/run/secrets/kubernetes.io/serviceaccount/"
RID=uuid.uuid4().hex[:8]
BUSY=set()
async def pods(ns,name):
    ctx=ssl.create_default_context(cafile=T+"ca.crt")
    async with aiohttp.ClientSession() as s:
        async with s.get(f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}/api/v1/namespaces/{ns}/pods?labelSelector=radixfleet.io/service%3D{name}", ssl=ctx, headers={"Authorization":"Bearer "+open(T+"token").read()}) as r:
            return (await r.json())["items"]
async def fleet(req):
    revs={}
    for p in await pods(req.match_info["ns"],req.match_info["name"]):
        l=p["metadata"]["labels"]; ready=any(c["type"]=="Ready" and c["status"]=="True" for c in p["status"].get("conditions",[]))
        d=p["metadata"].get("annotations",{}).get("radixfleet.io/draining")
        revs.setdefault(l["radixfleet.io/revision"],{"workers":[]})["workers"].append({"podUid":p["metadata"]["uid"],"role":l["radixfleet.io/role"],"state":"draining" if d else "ready" if ready else "starting","inflight":1 if p["metadata"]["name"] in BUSY else 0,"drainDeadline":d})
    return web.json_response({"routerId":RID,"synced":True,"revisions":revs})
async def probe(req): return web.json_response({"ok":True,"error":None,"ttftMs":3})
async def busy(req): BUSY.add(req.match_info["p"]); return web.Response(text="ok")
async def ok(req): return web.Response(text="ok")
def main():
    a=web.Application(); a.router.add_get("/fleet/{ns}/{name}",fleet); a.router.add_post("/fleet/{ns}/{name}/probe",probe); a.router.add_get("/livez",ok); a.router.add_get("/readyz",ok); a.router.add_get("/busy/{p}",busy)
    web.run_app(a,port=8001,print=None)
